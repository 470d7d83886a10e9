"""What comes back at the start of an attempt: rank 0 finds the newest good snapshot, and every rank loads that one."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import xxhash

from holdfast import progress
from holdfast.checkpoint import retention, snapshot
from holdfast.checkpoint.snapshot import Snapshot
from holdfast.checkpoint.state_tree import Flat, flatten, unflatten
from holdfast.checkpoint.store import Store
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput, Corrupt, StorageFailed
from holdfast.events import JSON, Commit
from holdfast.sampler.plan import LENGTH, SamplePlan
from holdfast.train.state import rng
from holdfast.train.state.attempt import AttemptContext
from holdfast.train.state.protected import Protected, digest, listed, tree_digest
from holdfast.train.state.snapshot_extra import CONDITIONS

logger = logging.getLogger(__name__)
RESTORED = "restored"
POSITIONS = "positions"  # in the extra of a snapshot: where the loader of every rank was, if loaders feed the run
STOPPED = "stopped"  # in the extra of a snapshot: the script has stopped the run there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestoredState:
    """What came back: the state after so many steps, or nothing; and what was passed over to find it."""

    step: int | None = None
    world: int = 0
    config: Mapping[str, JSON] | None = None
    conditions: Mapping[str, JSON] = field(default_factory=dict)
    generators: tuple[Mapping[str, Any], ...] = ()
    positions: tuple[Any, ...] = ()
    passed_over: tuple[Mapping[str, JSON], ...] = ()
    seconds: float = 0.0
    loaded: str = ""  # a digest of the state as it was read
    committed: str | None = None  # the digest under which its commit is on record
    weights: str | None = None  # the digest of the source whose weights were taken, where nothing came back
    stopped: bool = False  # the script had stopped the run there

    def state(self, protected: Protected) -> str | None:
        """The digest of the commit that came back, if memory holds exactly that now; else a digest of what it holds."""
        if self.step is None:
            return None
        now = protected.digest()
        return self.committed if now == self.loaded else now


def restore(attempt: AttemptContext, world: Ranks, protected: Protected) -> RestoredState:
    """Put the newest good snapshot back into what is protected, the same on every rank."""
    began = perf_counter()
    store = attempt.store
    with world.busy():
        found, told = _first_finds(attempt) if world.rank == 0 else (None, None)
    news = json.loads(world.from_first(RESTORED, told))
    passed_over = tuple(news["passed_over"])
    if news["step"] is None:
        return RestoredState(passed_over=passed_over, seconds=perf_counter() - began)
    if found is None:
        found = snapshot.load(store, news["step"], backoff=snapshot.BACKOFF, progress=progress.here.moves)
        check_of_a_run(found)
    _put_back(found, protected, store)
    flat = Flat(found.tensors, {"state": found.extra["state"]})
    in_memory = _own_put_back(found, protected, world) or flat
    return RestoredState(
        step=found.step,
        world=found.manifest.world,
        config=found.extra.get("config"),
        conditions=_conditions(found),
        generators=tuple(found.extra["generators"]),
        positions=tuple(found.extra.get(POSITIONS, ())),
        passed_over=passed_over,
        seconds=perf_counter() - began,
        loaded=digest(in_memory),
        committed=state_digest(found.manifest.tensors, tree_digest(flat)),
        stopped=found.extra.get(STOPPED) is True,
    )


def put_back(attempt: AttemptContext, world: Ranks, step: int, protected: Protected) -> None:
    """Put the snapshot of this step back once more."""
    found = snapshot.load(attempt.store, step, backoff=snapshot.BACKOFF)
    _put_back(found, protected, attempt.store)
    _own_put_back(found, protected, world)


def state_digest(tensors: str, tree: str) -> str:
    """The digest under which the commit of a state is on record: of the file of its tensors, and of all else."""
    return str(xxhash.xxh3_128_hexdigest(f"{tensors} {tree}".encode()))


def check_config(store: Store, restored: RestoredState, plan: SamplePlan, *, extend: bool) -> None:
    """Refuse a snapshot that was saved under another config; a longer plan is the same run, if it is to be extended."""
    if restored.step is None:
        return
    config, before = plan.to_json(), restored.config or {}
    names = [name for name in {**config, **before} if config.get(name) != before.get(name)]
    if names and all(name in LENGTH for name in names):
        _check_length(store, restored.step, plan, SamplePlan.from_json(before), extend=extend)
    elif names:
        fields = [f"{name} is {config.get(name)}, not {before.get(name)}" for name in names]
        raise _of_another(store, restored.step, fields)


def _check_length(store: Store, step: int, plan: SamplePlan, before: SamplePlan, *, extend: bool) -> None:
    """Refuse to train a run for another number of steps than it was to have, unless it is extended."""
    if plan.steps < before.steps:
        raise BadInput(
            f"the run in {store} was to train {before.steps} steps and has trained {step}, and now its plan has "
            f"{plan.steps}: a run can be made longer (--extend) and not shorter. Give it as many again, or name another folder"
        )
    if plan.steps > before.steps and not extend:
        raise BadInput(
            f"the plan of this run has {plan.steps} steps now, and the run in {store} was to train {before.steps}: give "
            "--extend to train it for longer, or name another folder"
        )


def key_generators(key: int, restored: RestoredState, world: Ranks) -> str:
    """Key the generators for the first window, and say how that compares with what was captured before it."""
    rng.set_all(key)
    if restored.step is None or restored.world != world.size:
        return "keyed"  # there is no captured state of this very share
    same = rng.capture() == restored.generators[world.rank]
    return "restored" if same else "none"  # not the same: a library that seeds its generator in another way


def _first_finds(attempt: AttemptContext) -> tuple[Snapshot | None, str]:
    """What rank 0 goes on from, what it tells the others of that; nothing is left of what killed attempts left behind."""
    found, passed_over = retention.resume(attempt.store, progress=progress.here.moves, check=check_of_a_run)
    step = found.step if found else None
    if found:
        _record_commit(attempt, found)
    elif not passed_over and attempt.had_snapshots:
        raise StorageFailed(
            f"{attempt.store} is empty, and this run has saved there before: see that it is mounted, or name another "
            "--out to begin anew"
        )
    retention.tidy(attempt.store, attempt.keep_last, trusted=step)
    return found, json.dumps({"step": step, "passed_over": [asdict(each) for each in passed_over]})


def check_of_a_run(found: Snapshot) -> None:
    """Refuse a snapshot that no run has saved, whatever its digests say: it may come from a stranger."""
    extra = found.extra
    if not isinstance(unflatten(found.tensors, extra), dict):
        raise Corrupt(f"the snapshot of step {found.step} does not hold the state of a run: fall back to an older one")
    rng, world = extra.get("generators"), found.manifest.world
    if not (isinstance(extra.get("config"), dict) and isinstance(rng, list) and len(rng) == world):
        raise Corrupt(
            f"the snapshot of step {found.step} lacks the config of a run, or generators of {world} ranks: fall back to "
            "an older one"
        )
    positions = extra.get(POSITIONS, rng)
    if not (isinstance(positions, list) and len(positions) == world):
        raise Corrupt(
            f"the snapshot of step {found.step} does not say where the loaders of {world} ranks were: fall back to an older one"
        )


def _record_commit(attempt: AttemptContext, found: Snapshot) -> None:
    """Put on record a commit whose rank 0 was killed before it could; and before any rank can say that it came back."""
    if not attempt.has_commit(found.step):
        state = state_digest(found.manifest.tensors, tree_digest(Flat({}, {"state": found.extra["state"]})))
        attempt.record.append(
            Commit(
                attempt.number,
                found.step,
                found.manifest.bytes,
                found=True,
                state=state,
                stops=found.extra.get(STOPPED) is True,
            )
        )
        attempt.record.flush()
        attempt.record.sync()


def _conditions(found: Snapshot) -> Mapping[str, JSON]:
    said = found.extra.get(CONDITIONS)  # older snapshots do not say
    return said if isinstance(said, dict) else {}


def _put_back(found: Snapshot, protected: Protected, store: Store) -> None:
    state = unflatten(found.tensors, found.extra)
    if differences := protected.differences(state):
        raise _of_another(store, found.step, differences)
    protected.restore(state)


def _own_put_back(found: Snapshot, protected: Protected, world: Ranks) -> Flat | None:
    """Put back plain values that this rank had for itself; the whole state as it should be in memory then."""
    own = found.extra.get("own")
    if own is None or not isinstance(own, list):
        return None
    if len(own) != world.size:
        if world.rank == 0 and any(each != own[0] for each in own):
            logger.warning(
                "holdfast: plain values that are protected (%s) differed between the ranks, and there were %d, not %d: all "
                "ranks go on with those of rank 0. run.sum and run.mean bring them together.",
                ", ".join(own[0]),
                len(own),
                world.size,
            )
        return None
    try:
        states = protected.restore_own(own[world.rank])
        return flatten({**unflatten(found.tensors, found.extra), **states})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"the snapshot of step {found.step} has no plain values of rank {world.rank} ({error!r:.200})"
        ) from error


def _of_another(store: Store, step: int, differences: list[str]) -> BadInput:
    return BadInput(
        f"the snapshot of step {step} in {store} is of another model or config ({listed(differences)}): "
        "train with what it was saved with, or name another folder"
    )
