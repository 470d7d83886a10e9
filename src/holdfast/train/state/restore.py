"""Restore the state of a run when an attempt starts: rank 0 finds the newest good snapshot, and every rank loads it."""

import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from holdfast import progress
from holdfast.checkpoint import retention, snapshot
from holdfast.checkpoint.payload import FlatState, flatten, unflatten
from holdfast.checkpoint.snapshot import PassedOver, Snapshot
from holdfast.checkpoint.store import Store
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput, Corrupt, StorageFailed
from holdfast.events import JSON, Commit
from holdfast.sampler.plan import LENGTH, SamplePlan
from holdfast.sampler.run_plan import RunPlan, phases_of
from holdfast.train.state.attempt import AttemptContext
from holdfast.train.state.protected import Protected, digest, listed, tree_digest
from holdfast.train.state.save import (
    CONDITIONS,
    CONFIG,
    GENERATORS,
    OWN,
    POSITIONS,
    STATE,
    STOPPED,
    state_digest,
)

logger = logging.getLogger(__name__)
RESTORED = "restored"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestoredState:
    """Facts about the snapshot from which the run resumed. `step` is None if there was no snapshot.

    `passed_over` are damaged newer snapshots. `loaded` is the digest of the state as read, and `committed` the digest
    in the history. `weights` is the digest of the weights from --init-from."""

    step: int | None = None
    world: int = 0
    config: Mapping[str, JSON] | None = None
    conditions: Mapping[str, JSON] = field(default_factory=dict)
    generators: tuple[Mapping[str, Any], ...] = ()
    positions: tuple[Any, ...] = ()
    passed_over: tuple[Mapping[str, JSON], ...] = ()
    seconds: float = 0.0
    loaded: str = ""
    committed: str | None = None
    weights: str | None = None
    built: float | None = None  # seconds from the beginning of the attempt to `run.protect`
    stopped: bool = False  # the script stopped the run there

    def digest_in_memory(self, protected: Protected) -> str | None:
        """Return the snapshot's recorded digest if `protected` still equals the snapshot, else its own digest."""
        in_memory = protected.digest()
        return self.committed if in_memory == self.loaded else in_memory


class SnapshotFetch:
    """A background thread that finds, reads and verifies the newest good snapshot while the script builds its model.

    Rank 0 chooses the snapshot, and every rank reads it."""

    def __init__(self, attempt: AttemptContext, ranks: Ranks) -> None:
        self._attempt, self._ranks = attempt, ranks
        self._fetched: Future[tuple[Snapshot | None, tuple[Mapping[str, JSON], ...]]] = Future()
        threading.Thread(target=self._run, name="holdfast-fetch", daemon=True).start()

    def result(self) -> tuple[Snapshot | None, tuple[Mapping[str, JSON], ...]]:
        """Wait for the thread, and raise its error, if any.

        Return the newest undamaged snapshot or None, and descriptions of the newer snapshots that are damaged."""
        return self._fetched.result()

    def _run(self) -> None:
        try:
            self._fetched.set_result(self._fetch())
        except BaseException as error:  # the main thread raises it
            self._fetched.set_exception(error)

    def _fetch(self) -> tuple[Snapshot | None, tuple[Mapping[str, JSON], ...]]:
        with self._ranks.busy():
            found, message = _find_newest(self._attempt) if self._ranks.rank == 0 else (None, None)
        chosen = json.loads(self._ranks.from_rank_0(RESTORED, message))
        if found is None and chosen["step"] is not None:
            store, moved = self._attempt.store, progress.here.add_moved
            found = snapshot.load(store, chosen["step"], backoff=snapshot.BACKOFF, progress=moved)
            check_of_a_run(found)
        return found, tuple(chosen["passed_over"])


def restore(fetch: SnapshotFetch, attempt: AttemptContext, ranks: Ranks, protected: Protected) -> RestoredState:
    """Load the snapshot that `fetch` has read, the same on every rank, into the protected objects."""
    began = perf_counter()
    found, passed_over = fetch.result()
    if found is None:
        return RestoredState(passed_over=passed_over, seconds=perf_counter() - began)
    flat = _load(found, attempt, ranks, protected)
    return RestoredState(
        step=found.step,
        world=found.manifest.world,
        config=found.extra[CONFIG],
        conditions=found.extra[CONDITIONS],
        generators=tuple(found.extra[GENERATORS]),
        positions=tuple(found.extra.get(POSITIONS, ())),
        passed_over=passed_over,
        seconds=perf_counter() - began,
        loaded=digest(flat),
        committed=_digest_of_commit(found),
        stopped=_is_stopped(found),
    )


def restore_again(attempt: AttemptContext, ranks: Ranks, step: int, protected: Protected) -> None:
    """Load the snapshot of `step` into the protected objects once more."""
    _load(snapshot.load(attempt.store, step, backoff=snapshot.BACKOFF), attempt, ranks, protected)


def check_phase(store: Store, restored: RestoredState, plan: SamplePlan, index: int) -> None:
    """Raise BadInput if the saved run had another order of samples in phase (training loop) number `index`.

    The last phase of the saved run may have another length, which `check_length` checks."""
    phases = phases_of(restored.config) if restored.config else []
    if index >= len(phases):
        return
    config, saved = plan.to_json(), phases[index]
    names = [name for name in {**config, **saved} if config.get(name) != saved.get(name)]
    fields = [f"{name} is {config.get(name)}, not {saved.get(name)}" for name in names]
    if [name for name in names if name not in LENGTH or index + 1 < len(phases)]:
        raise _of_another_run(store, restored.step or 0, fields)


def check_length(store: Store, restored: RestoredState, plan: RunPlan, *, extend: bool) -> None:
    """Raise BadInput if the run has fewer steps than planned when it was saved, or more steps without `extend`."""
    saved = RunPlan.from_json(restored.config) if restored.config else plan
    if plan.steps < saved.steps:
        raise BadInput(
            f"the run in {store} was to train {saved.steps} steps and has trained {restored.step}, and now its plan has "
            f"{plan.steps}: a run can be made longer (--extend) and not shorter. Give it the same number of steps, or "
            "name another folder."
        )
    if plan.steps > saved.steps and not extend:
        raise BadInput(
            f"the plan of this run has {plan.steps} steps now, and the run in {store} was to train {saved.steps}: give "
            "--extend to train it for longer, or name another folder."
        )


def _find_newest(attempt: AttemptContext) -> tuple[Snapshot | None, str]:
    """Return the newest good snapshot, and a JSON message about it for the other ranks.

    Runs on rank 0, and removes incomplete files that killed processes left in the store."""

    def check(found: Snapshot) -> None:
        check_of_a_run(found)
        attempt.check_history(found.step, _digest_of_commit(found))

    found, passed_over = retention.resume(attempt.store, progress=progress.here.add_moved, check=check)
    step = found.step if found else None
    if found:
        _record_commit(attempt, found)
    elif not passed_over and attempt.had_snapshots:
        raise StorageFailed(
            f"{attempt.store} is empty, and this run has saved there before: check that it is mounted, or name another "
            "--out to start a new run."
        )
    else:
        _warn_of_new_start(attempt, passed_over)
    retention.tidy(attempt.store, attempt.keep_last, trusted=step)
    return found, json.dumps({"step": step, "passed_over": [asdict(damaged) for damaged in passed_over]})


def _warn_of_new_start(attempt: AttemptContext, passed_over: tuple[PassedOver, ...]) -> None:
    """Warn that a run which has saved before starts again at step 0, because none of its snapshots can be used."""
    if passed_over:
        logger.warning(
            "holdfast: no snapshot in %s can be used (%s): training starts again at step 0, and the steps trained so far are "
            "repeated. Unusable snapshots are kept there as set-aside-*.",
            attempt.store,
            "; ".join(f"{damaged.name.rstrip('/')}: {damaged.why}" for damaged in passed_over),
        )


def _record_commit(attempt: AttemptContext, found: Snapshot) -> None:
    """Record in the history that the snapshot is complete, if rank 0 was killed before it could do so."""
    if attempt.has_commit(found.step):
        return
    state, stops = _digest_of_commit(found), _is_stopped(found)
    attempt.record.append(
        Commit(attempt.number, found.step, found.manifest.bytes, found=True, state=state, stops=stops)
    )
    attempt.record.flush()
    attempt.record.sync()


def _digest_of_commit(found: Snapshot) -> str:
    return state_digest(found.manifest.tensors, tree_digest(FlatState({}, {STATE: found.extra[STATE]})))


def _is_stopped(found: Snapshot) -> bool:
    return found.extra.get(STOPPED) is True


def _load(found: Snapshot, attempt: AttemptContext, ranks: Ranks, protected: Protected) -> FlatState:
    """Load a snapshot into the protected objects; return the flattened state that the objects should now have."""
    state = unflatten(found.tensors, found.extra)
    if differences := protected.differences(state):
        raise _of_another_run(attempt.store, found.step, differences)
    protected.restore(state)
    own = found.extra.get(OWN)
    if isinstance(own, list) and len(own) == ranks.size:
        try:
            return flatten({**unflatten(found.tensors, found.extra), **protected.restore_own(own[ranks.rank])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(
                f"the snapshot of step {found.step} lacks the plain values of rank {ranks.rank} ({error!r:.200})."
            ) from error
    if isinstance(own, list) and ranks.rank == 0 and any(values != own[0] for values in own):
        logger.warning(
            "holdfast: protected plain values (%s) differed between the %d ranks that saved them, and there are %d now: all "
            "ranks use those of rank 0. run.sum and run.mean combine them.",
            ", ".join(own[0]),
            len(own),
            ranks.size,
        )
    return FlatState(found.tensors, {STATE: found.extra[STATE]})


def _of_another_run(store: Store, step: int, differences: list[str]) -> BadInput:
    return BadInput(
        f"the snapshot of step {step} in {store} is of another model or config ({listed(differences)}): "
        "train with what it was saved with, name another folder with --out, or remove the run with `holdfast runs rm`."
    )


def check_of_a_run(snapshot: Snapshot) -> None:
    """Raise Corrupt if the snapshot lacks data that every training run saves, such as random generator states."""
    extra, world_size = snapshot.extra, snapshot.manifest.world
    if not isinstance(unflatten(snapshot.tensors, extra), dict):
        raise Corrupt(f"the snapshot of step {snapshot.step} does not hold the state of a run: use an older one.")
    for name in (CONFIG, CONDITIONS):
        if not isinstance(extra.get(name), dict):
            raise Corrupt(f"the snapshot of step {snapshot.step} lacks the {name} of a run: use an older one.")
    for name in (GENERATORS, POSITIONS):
        entries = extra.get(name, [None] * world_size if name == POSITIONS else None)
        if not (isinstance(entries, list) and len(entries) == world_size):
            raise Corrupt(
                f"the snapshot of step {snapshot.step} lacks the {name} of {world_size} ranks: use an older one."
            )
