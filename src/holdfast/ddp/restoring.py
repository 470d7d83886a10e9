"""What comes back at the start of an attempt: rank 0 finds the newest good snapshot, and every rank loads that one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from holdfast.checkpoint import snapshot
from holdfast.checkpoint.snapshot import Manifest, PassedOver, Snapshot
from holdfast.checkpoint.store import Store
from holdfast.ddp import generators
from holdfast.ddp.attempt import Attempt
from holdfast.ddp.protected import Protected, listed
from holdfast.ddp.world import World
from holdfast.errors import BadInput, Corrupt, NoSnapshot
from holdfast.events import JSON, Commit
from holdfast.state import unflatten

RESTORED = "restored"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restored:
    """What came back: the state after so many steps, or nothing; and what was passed over to find it."""

    step: int | None = None
    world: int = 0
    config: Mapping[str, JSON] | None = None
    generators: tuple[Mapping[str, Any], ...] = ()
    passed_over: tuple[Mapping[str, JSON], ...] = ()
    seconds: float = 0.0


def restore(attempt: Attempt, world: World, protected: Protected) -> Restored:
    """Put the newest good snapshot back into what is protected, the same on every rank."""
    began = perf_counter()
    store = attempt.store
    found, told = _first_finds(attempt) if world.rank == 0 else (None, None)
    news = json.loads(world.from_first(RESTORED, told))
    passed_over = tuple(news["passed_over"])
    if news["step"] is None:
        return Restored(passed_over=passed_over, seconds=perf_counter() - began)
    found = found or snapshot.load(store, news["step"])
    _put_back(found, protected, store)
    return Restored(
        step=found.step,
        world=found.manifest.world,
        config=found.extra.get("config"),
        generators=tuple(found.extra.get("generators", ())),
        passed_over=passed_over,
        seconds=perf_counter() - began,
    )


def check_config(store: Store, restored: Restored, config: Mapping[str, JSON]) -> None:
    """Refuse a snapshot that was saved under another config."""
    before = restored.config or {}
    fields = [
        f"{name} is {config[name]}, not {before.get(name)}" for name in config if config[name] != before.get(name)
    ]
    if restored.step is not None and fields:
        raise _of_another(store, restored.step, fields)


def key_generators(key: int, restored: Restored, world: World) -> str:
    """Key the generators for the first window, and say how that compares with what was captured before it."""
    generators.set_all(key)
    if restored.step is None or restored.world != world.size:
        return "keyed"  # there is no captured state of this very share
    same = generators.capture() == restored.generators[world.rank]
    return "restored" if same else "none"  # not the same: a library that seeds its generator in another way


def _first_finds(attempt: Attempt) -> tuple[Snapshot | None, str]:
    try:
        found = snapshot.newest(attempt.store)
        step, passed_over = found.step, found.passed_over
        _record_commit(attempt, found.manifest)
    except NoSnapshot:
        found, step, passed_over = None, None, tuple(_all_bad(attempt.store))
    return found, json.dumps({"step": step, "passed_over": [asdict(each) for each in passed_over]})


def _record_commit(attempt: Attempt, manifest: Manifest) -> None:
    """Put on record a commit whose rank 0 was killed before it could; and before any rank can say that it came back."""
    if manifest.step not in attempt.past.committed:
        attempt.record.append(Commit(attempt.number, manifest.step, manifest.bytes, found=True))
        attempt.record.flush()


def _all_bad(store: Store) -> list[PassedOver]:
    return [PassedOver(snapshot.manifest_name(step), _why(store, step)) for step in reversed(snapshot.steps(store))]


def _why(store: Store, step: int) -> str:
    try:
        snapshot.check(store, step)
    except (Corrupt, NoSnapshot) as error:
        return str(error)
    return "it was bad when it was first read"


def _put_back(found: Snapshot, protected: Protected, store: Store) -> None:
    state = unflatten(found.tensors, found.extra)
    if differences := protected.differences(state):
        raise _of_another(store, found.step, differences)
    protected.restore(state)


def _of_another(store: Store, step: int, differences: list[str]) -> BadInput:
    return BadInput(
        f"the snapshot of step {step} in {store} is of another model or config ({listed(differences)}): "
        "train with what it was saved with, or name another folder"
    )
