"""Restore the state of a run when an attempt starts, from the newest snapshot that every rank can read.

Rank 0 proposes the newest snapshot, and every rank reads its part. If a rank finds damage, rank 0 proposes the next older
snapshot.
"""

import json
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from holdfast import progress
from holdfast.blocks.division import Array
from holdfast.checkpoint import manifest, retention, snapshot
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.payload import FlatState, flatten, unflatten
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.snapshot import PassedOver
from holdfast.checkpoint.store import Store
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput, Corrupt, InitialWeightsLost, NoSnapshot, StorageFailed
from holdfast.events import JSON, Commit
from holdfast.sampler.plan import LENGTH, SamplePlan
from holdfast.sampler.run_plan import RunPlan, phases_of
from holdfast.train.state.attempt import AttemptContext
from holdfast.train.state.differences import listed
from holdfast.train.state.protected import Protected
from holdfast.train.state.save import (
    CONDITIONS,
    CONFIG,
    GENERATORS,
    OWN,
    POSITIONS,
    SHARDED,
    STATE,
    STOPPED,
    TENSOR_PARALLEL,
)
from holdfast.train.state.shards import read_parts
from holdfast.train.state.state_digests import digest, snapshot_digest, tree_digest

logger = logging.getLogger(__name__)
RESTORED = "restored"
UNREADABLE = "unreadable: "  # begins the message of a rank to which the storage gave an error, and not damaged data


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestoredState:
    """Facts about the snapshot that the run resumed from. `step` is None if there was no snapshot.

    `passed_over` are newer snapshots that were damaged. `loaded` is the digest of the state as read, and `committed` the
    digest in the history. `weights` is the digest of the weights from --init-from."""

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

    def has_shares_of(self, ranks: Ranks) -> bool:
        """Return True if the samples were divided among the ranks that saved it as they are among `ranks`."""
        return _has_shares_of(ranks, self.world, self.conditions)

    def digest_in_memory(self, protected: Protected) -> str | None:
        """Return the snapshot's recorded digest if `protected` still equals it, else the digest of `protected`."""
        in_memory = protected.digest()
        return self.committed if in_memory == self.loaded else in_memory


@dataclass(frozen=True, slots=True, eq=False)
class ReadSnapshot:
    """A snapshot with the tensors that this rank has read: whole tensors, or its shards of distributed tensors."""

    reader: SnapshotReader
    tensors: dict[str, Array]


class SnapshotFetch:
    """A background thread that opens the newest snapshot while the script builds its model.

    If every rank holds the whole model, the thread also reads and verifies the snapshot. If the model is sharded, each
    rank reads its part later, when the script has sharded the model."""

    def __init__(self, attempt: AttemptContext) -> None:
        self._store = attempt.store
        self._opened: Future[SnapshotReader | None] = Future()
        threading.Thread(target=self._run, name="holdfast-fetch", daemon=True).start()

    def reader_of(self, step: int) -> SnapshotReader:
        """Return a reader of the snapshot of `step`; raise Corrupt or StorageFailed if it cannot be opened or read."""
        opened = self._opened.result()
        if opened is not None and opened.step == step:
            return opened
        return snapshot.retried(step, snapshot.BACKOFF, lambda: _open(self._store, step))

    def _run(self) -> None:
        try:
            newest = max(manifest.steps(self._store), default=None)
            self._opened.set_result(None if newest is None else _open(self._store, newest))
        except Exception:  # opening it again, in the main thread, raises the error
            self._opened.set_result(None)


def _open(store: Store, step: int) -> SnapshotReader:
    reader = SnapshotReader(store, step, progress.here.add_moved)
    if not reader.extra.get(SHARDED):
        reader.preload()
    return reader


class _Restoring:
    """The restore of an attempt: rank 0 proposes snapshots, the newest first, until every rank can read the snapshot."""

    def __init__(self, fetch: SnapshotFetch, attempt: AttemptContext, ranks: Ranks, protected: Protected) -> None:
        self._fetch, self._attempt, self._ranks, self._protected = fetch, attempt, ranks, protected
        self._proposals = 0
        self._overwritten = False  # True once a snapshot was read into the sharded tensors of the script

    def lead(self) -> tuple[ReadSnapshot | None, tuple[Mapping[str, JSON], ...]]:
        """Choose the snapshot on rank 0; return it (None if there is none) and the damaged snapshots passed over.

        Also remove incomplete files that killed processes left in the store."""
        attempt = self._attempt
        with self._ranks.busy():
            suspect = _set_suspects_aside(attempt)
            found, damaged = retention.resume(attempt.store, self._propose)
            if found:
                _record_commit(attempt, found.reader)
            elif not damaged and not retention.aside(attempt.store) and attempt.had_snapshots:
                raise StorageFailed(
                    f"{attempt.store} is empty, and this run has saved there before: check that it is mounted, or name "
                    "another --out to start a new run."
                )
            else:
                _warn_of_new_start(attempt, damaged)
            retention.tidy(attempt.store, attempt.keep_last, trusted=found.reader.step if found else None)
        passed_over = tuple(asdict(snapshot) for snapshot in (*suspect, *damaged))
        message = {"step": found.reader.step if found else None, "passed_over": passed_over}
        self._ranks.post(f"{RESTORED}/{self._proposals}", json.dumps(message))
        return found, passed_over

    def follow(self) -> tuple[ReadSnapshot | None, tuple[Mapping[str, JSON], ...]]:
        """Read each snapshot that rank 0 proposes, until rank 0 reports its choice. Called on every other rank.

        Return the chosen snapshot (None if there is none) and the damaged snapshots passed over."""
        read: ReadSnapshot | None = None
        while "passed_over" not in (message := json.loads(self._ranks.wait_for(f"{RESTORED}/{self._proposals}"))):
            why = ""
            try:
                read = self._read(message["step"])
            except (Corrupt, NoSnapshot) as error:
                why = f"rank {self._ranks.rank}: {error}"
            except StorageFailed as error:
                why = f"{UNREADABLE}rank {self._ranks.rank}: {error}"
            self._ranks.post(f"{RESTORED}/{self._proposals}/{self._ranks.rank}", why)
            self._proposals += 1
        return read if message["step"] is not None else None, tuple(message["passed_over"])

    def _propose(self, step: int) -> ReadSnapshot:
        reader = self._fetch.reader_of(step)
        check_of_a_run(reader.extra, reader.manifest)
        self._attempt.check_history(step, _digest_of_commit(reader))
        proposal = f"{RESTORED}/{self._proposals}"
        self._proposals += 1
        self._ranks.post(proposal, json.dumps({"step": step}))
        failure: Exception | None = None
        try:
            read = self._read(step)
        except (Corrupt, NoSnapshot, StorageFailed) as error:
            failure = error
        for rank in range(1, self._ranks.size):
            if why := self._ranks.wait_for(f"{proposal}/{rank}"):
                kind = StorageFailed if why.startswith(UNREADABLE) else Corrupt
                failure = failure or kind(why.removeprefix(UNREADABLE))
        if failure:
            raise failure
        return read

    def _read(self, step: int) -> ReadSnapshot:
        reader, protected = self._fetch.reader_of(step), self._protected
        held = _held(protected)
        self._overwritten |= bool(held)

        def read() -> ReadSnapshot:
            tensors = read_parts(reader, held, protected.parameter_of, self._ranks.rank)
            unflatten(tensors, reader.extra)  # raises Corrupt if the two do not match
            return ReadSnapshot(reader, tensors)

        return snapshot.retried(step, snapshot.BACKOFF, read)

    def check_first_weights(self) -> None:
        """Raise InitialWeightsLost if a damaged snapshot has overwritten the initial values of the script's sharded tensors."""
        if self._overwritten:
            raise InitialWeightsLost(
                f"no snapshot in {self._attempt.store} can be used, and reading them has overwritten the sharded weights that "
                "the script made: the next attempt makes them again and starts at step 0."
            )


def _held(protected: Protected) -> dict[str, Array]:
    """Return the present tensors by name, to read a snapshot into; empty if no model is sharded."""
    return flatten(protected.capture()).tensors if protected.is_sharded else {}


def restore(fetch: SnapshotFetch, attempt: AttemptContext, ranks: Ranks, protected: Protected) -> RestoredState:
    """Load the newest snapshot that every rank can read into the protected objects. Return facts about it.

    If there is no such snapshot, the `step` of the result is None."""
    began = perf_counter()
    restoring = _Restoring(fetch, attempt, ranks, protected)
    found, passed_over = restoring.follow() if ranks.rank else restoring.lead()
    if found is None:
        restoring.check_first_weights()
        return RestoredState(passed_over=passed_over, seconds=perf_counter() - began)
    flat = _load(found, attempt, ranks, protected)
    record, extra = found.reader.manifest, found.reader.extra
    return RestoredState(
        step=record.step,
        world=record.world,
        config=extra[CONFIG],
        conditions=extra[CONDITIONS],
        generators=tuple(extra[GENERATORS]),
        positions=tuple(extra.get(POSITIONS, ())),
        passed_over=passed_over,
        seconds=perf_counter() - began,
        loaded=digest(flat),
        committed=_digest_of_commit(found.reader),
        stopped=_is_stopped(found.reader),
    )


def restore_again(attempt: AttemptContext, ranks: Ranks, step: int, protected: Protected) -> None:
    """Load the snapshot of `step` into the protected objects once more."""
    reader = snapshot.retried(step, snapshot.BACKOFF, lambda: _open(attempt.store, step))
    tensors = read_parts(reader, _held(protected), protected.parameter_of, ranks.rank)
    _load(ReadSnapshot(reader, tensors), attempt, ranks, protected)


def restore_shard(attempt: AttemptContext, ranks: Ranks, protected: Protected, step: int) -> int | None:
    """Load the newest good snapshot of `step` or earlier into the protected objects, on this rank alone.

    Return the step of the snapshot, or None if there is none."""
    held = _held(protected)

    def read(saved: int) -> ReadSnapshot:
        if saved > step:
            raise Corrupt(f"the snapshot of step {saved} is newer than step {step}, which is trained now.")
        reader = _open(attempt.store, saved)
        check_of_a_run(reader.extra, reader.manifest)
        return ReadSnapshot(reader, read_parts(reader, held, protected.parameter_of, ranks.rank))

    found, _ = snapshot.search(
        attempt.store, lambda saved: snapshot.retried(saved, snapshot.BACKOFF, lambda: read(saved))
    )
    if found is None:
        return None
    if ranks.rank == 0:
        _record_commit(attempt, found.reader)
    _load(found, attempt, ranks, protected)
    return found.reader.step


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


def _set_suspects_aside(attempt: AttemptContext) -> tuple[PassedOver, ...]:
    """Set aside the snapshots that may contain the wrong state for which this attempt restarts the run."""
    corruption = attempt.corruption
    if corruption is None:
        return ()
    good = -1 if corruption.agreed is None else corruption.agreed
    return retention.set_newer_aside(
        attempt.store, good, f"it was saved after step {good}, the last before which all ranks had the right state"
    )


def _warn_of_new_start(attempt: AttemptContext, passed_over: tuple[PassedOver, ...]) -> None:
    """Warn that a run which has saved before starts again at step 0, because none of its snapshots can be used."""
    if passed_over:
        logger.warning(
            "holdfast: no snapshot in %s can be used (%s): training starts again at step 0, and the steps trained so far are "
            "repeated. Unusable snapshots are kept there as set-aside-*.",
            attempt.store,
            "; ".join(f"{damaged.name.rstrip('/')}: {damaged.why}" for damaged in passed_over),
        )


def _record_commit(attempt: AttemptContext, found: SnapshotReader) -> None:
    """Record in the history that the snapshot is complete, if rank 0 was killed before it could do so.

    Raise WorkerLost if other nodes continued without this node: the snapshot may be theirs, of steps that no attempt of
    this node has trained."""
    if attempt.has_commit(found.step):
        return
    attempt.store.require_present()
    state, stops = _digest_of_commit(found), _is_stopped(found)
    attempt.record.append(
        Commit(attempt.number, found.step, found.manifest.bytes, found=True, state=state, stops=stops)
    )
    attempt.record.flush()
    attempt.record.sync()


def _digest_of_commit(found: SnapshotReader) -> str:
    return snapshot_digest(found.manifest.tensors, tree_digest(FlatState({}, {STATE: found.extra[STATE]})))


def _is_stopped(found: SnapshotReader) -> bool:
    return found.extra.get(STOPPED) is True


def _load(found: ReadSnapshot, attempt: AttemptContext, ranks: Ranks, protected: Protected) -> FlatState:
    """Load a snapshot into the protected objects; return the flattened state that the objects should now have."""
    step, extra = found.reader.step, found.reader.extra
    state = unflatten(found.tensors, extra)
    if differences := protected.differences(state):
        raise _of_another_run(attempt.store, step, differences)
    protected.restore(state)
    own = extra.get(OWN)
    if isinstance(own, list) and _has_shares_of(ranks, len(own), extra[CONDITIONS]):
        try:
            return flatten({**unflatten(found.tensors, extra), **protected.restore_own(own[ranks.rank])})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt(
                f"the snapshot of step {step} lacks the plain values of rank {ranks.rank} ({error!r:.200})."
            ) from error
    if isinstance(own, list) and ranks.rank == 0 and any(values != own[0] for values in own):
        logger.warning(
            "holdfast: protected plain values (%s) differed between the %d ranks that saved them, and the samples are divided "
            "into %d %s now: all ranks use those of rank 0. run.sum and run.mean combine them.",
            ", ".join(own[0]),
            len(own),
            ranks.shares,
            "share" if ranks.shares == 1 else "shares",
        )
    return FlatState(found.tensors, {STATE: extra[STATE]})


def _has_shares_of(ranks: Ranks, world: int, conditions: Mapping[str, JSON]) -> bool:
    return world == ranks.size and conditions.get(TENSOR_PARALLEL, 1) == ranks.tensor_parallel


def _of_another_run(store: Store, step: int, differences: list[str]) -> BadInput:
    is_batch = any(difference.startswith("batch is ") for difference in differences)
    constant = "write global_batch as a constant if the script computes it from run.world_size, " if is_batch else ""
    return BadInput(
        f"the snapshot of step {step} in {store} is of another model or config ({listed(differences)}): "
        f"{constant}train with what it was saved with, name another folder with --out, or remove the run with `holdfast runs rm`."
    )


def check_of_a_run(extra: Mapping[str, Any], record: Manifest) -> None:
    """Raise Corrupt if a snapshot lacks data that every training run saves, such as random generator states."""
    step, world_size = record.step, record.world
    if not isinstance(extra.get(STATE), dict) or extra[STATE].keys() != {"dict"}:
        raise Corrupt(f"the snapshot of step {step} does not hold the state of a run: use an older one.")
    for name in (CONFIG, CONDITIONS):
        if not isinstance(extra.get(name), dict):
            raise Corrupt(f"the snapshot of step {step} lacks the {name} of a run: use an older one.")
    for name in (GENERATORS, POSITIONS):
        entries = extra.get(name, [None] * world_size if name == POSITIONS else None)
        if not (isinstance(entries, list) and len(entries) == world_size):
            raise Corrupt(f"the snapshot of step {step} lacks the {name} of {world_size} ranks: use an older one.")
