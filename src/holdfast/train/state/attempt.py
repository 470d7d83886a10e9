"""One attempt (start) of a run: its number, the records of earlier attempts, and the recorder of its own events."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast import process, progress
from holdfast.checkpoint.place import read_ahead, store_at
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.terms import Fenced, Term
from holdfast.distributed.ranks import JOINS, NODE, TERM, Ranks, node_key
from holdfast.errors import Corrupt
from holdfast.events import Attempt as AttemptEvent
from holdfast.events import Corruption, Plan, What
from holdfast.history.log import HistoryWriter
from holdfast.history.tail import (
    PastAttempts,
    committed_state,
    following,
    furthest_step,
    had_snapshots,
    has_commit,
    read_past,
    unresolved_corruption,
)
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.runs.lock import Lock, alone

ATTEMPT = "attempt"
STANDBY_POLL = 0.005  # seconds


class Recorder(Protocol):
    """An object that records the events of one rank."""

    def append(self, what: What, time: float | None = None) -> None:
        """Add the event `what`. Its time is `time`, by default now."""

    def flush(self) -> None:
        """Hand all events to the operating system, so that the death of this process cannot lose them."""

    def sync(self) -> None:
        """Wait until all flushed events are on disk, so that a power failure cannot lose them."""

    def close(self) -> None:
        """Flush and sync all events, and close the history."""


class MemberRecorder:
    """The recorder of a worker that may join, leave and rejoin the workers that train.

    Each time the worker joins, it starts a new part of the history of its member number. While it does not train with
    the other workers, its events are discarded, except the plan, which is recorded when it joins."""

    def __init__(self, folder: Path, attempt: int, world_size: int, seed: int | None = None) -> None:
        self._folder, self._attempt, self._world_size, self._seed = folder, attempt, world_size, seed
        self._history: HistoryWriter | None = None
        self._member: int | None = None
        self._plan: Plan | None = None

    def enrol(self, member: int) -> None:
        """Record events in the history of member number `member` from now on."""
        if self._member == member:
            return
        self.retire()
        self._member = member
        self._history = HistoryWriter(self._folder, f"rank-{member}")
        self._history.append(AttemptEvent(self._attempt, self._world_size, member, os.getpid(), self._seed))
        if self._plan:
            self._history.append(self._plan)
        self._history.flush()

    def retire(self) -> None:
        """Stop recording, because this worker has left the workers that train."""
        if self._history:
            self._history.close()
        self._history = self._member = None

    def append(self, what: What, time: float | None = None) -> None:
        if isinstance(what, Plan):
            self._plan = what
        if self._history:
            self._history.append(what, time)

    def flush(self) -> None:
        if self._history:
            self._history.flush()

    def sync(self) -> None:
        if self._history:
            self._history.sync()

    def close(self) -> None:
        self.retire()


class NoRecorder:
    """The recorder of a run without a folder: it discards all events."""

    def append(self, what: What, time: float | None = None) -> None:
        pass

    def flush(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class AttemptContext:
    """The present attempt (from a start of all workers to their end) as one rank sees it."""

    number: int
    folder: Path  # of the run's histories
    past: PastAttempts
    record: Recorder
    store: Store
    keep_last: int
    lock: Lock | None = None  # on the run's folder; under a supervisor, the supervisor holds it
    is_complete: bool = False  # the history is beside the checkpoints, so it tells of every snapshot

    def check_history(self, step: int, state: str) -> None:
        """Raise Corrupt if the history contradicts a snapshot of `step` with the digest `state`.

        That is the case if it has another digest for that snapshot, or if the run has not reached `step`."""
        if not self.is_complete:
            return
        committed, reached = committed_state(self.folder, step), furthest_step(self.folder)
        if committed not in (None, state) or (reached is not None and reached < step):
            raise Corrupt(
                f"the snapshot of step {step} is not what this run saved, by its history: it was replaced or relabelled. "
                "An older one is used."
            )

    def has_commit(self, step: int) -> bool:
        """Return True if the history records that the snapshot of `step`, the newest snapshot, was completed."""
        return has_commit(self.folder, step)

    @property
    def corruption(self) -> Corruption | None:
        """The corruption for which this attempt restarts the run, as rank 0 recorded it; None for other causes."""
        return unresolved_corruption(self.folder)

    @property
    def had_snapshots(self) -> bool:
        """True if earlier attempts had a snapshot to resume from."""
        return had_snapshots(self.folder)


def await_standby() -> None:
    """Wait until the present attempt fails and a new one begins. Called in a worker that was started in advance."""
    with progress.during(Phase.JOINING):
        while progress.here.is_standby:
            time.sleep(STANDBY_POLL)
    process.set_title(f"hf-rank-{os.environ['RANK']}")


def begin(out: Path, ranks: Ranks, config: RunConfig) -> AttemptContext:
    """Begin the next attempt (from a start of all workers to their end) of the run in folder `out`.

    Rank 0 reads the history and sends the number of the attempt to the other ranks."""
    folder, shared = out / "history", store_at(config.checkpoints or out / "checkpoints")
    store = _fenced(shared, ranks)
    if JOINS in os.environ:  # the attempt is under way
        number = int(os.environ["HOLDFAST_ATTEMPT"])
        record: Recorder = MemberRecorder(folder, number, ranks.size, config.seed)
        past = PastAttempts(struck=read_past(folder).struck)
        return AttemptContext(number, folder, past, record, store, config.keep_last)
    lock = alone(out) if ranks.rank == 0 and "HOLDFAST_OUT" not in os.environ else None
    if ranks.rank == 0:
        past = read_past(folder)
        # A supervisor also counts attempts that died before they recorded anything.
        number = max(following(past.attempt, folder), int(os.environ.get("HOLDFAST_ATTEMPT", "1")))
    else:
        number, struck = json.loads(ranks.wait_for(ATTEMPT))
        elsewhere = frozenset((step, kind, rank, point) for step, kind, rank, point in struck)
        past = PastAttempts(struck=elsewhere | read_past(folder).struck)  # a node's folder holds what struck there
    record = _recorder(folder, number, ranks, config)
    if ranks.rank == 0:
        record.sync()  # before another rank can record this attempt: a number is used once
        ranks.post(ATTEMPT, json.dumps([number, sorted(past.struck)]))
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the ranks of a node share its page cache
        read_ahead(shared)
    is_complete = config.checkpoints is None
    return AttemptContext(number, folder, past, record, store, config.keep_last, lock, is_complete)


def _fenced(store: Store, ranks: Ranks) -> Store:
    """Return `store`. In a run on several nodes, wrap it to refuse writes once other nodes continue without this one."""
    term, connect = os.environ.get(TERM), ranks.connect
    if term is None or connect is None:
        return store

    def is_ours(newer: Term) -> bool:
        return bool(connect().check([node_key(newer.token, int(os.environ[NODE]))]))

    return Fenced(store, int(term), is_ours)


def _recorder(folder: Path, number: int, ranks: Ranks, config: RunConfig) -> Recorder:
    if config.recovery != "restart":
        enrolled = MemberRecorder(folder, number, ranks.size, config.seed)
        enrolled.enrol(ranks.rank)
        return enrolled
    record = HistoryWriter(folder, f"rank-{ranks.rank}")
    record.append(AttemptEvent(number, ranks.size, ranks.rank, os.getpid(), config.seed))
    record.flush()
    return record
