"""One attempt in the folder of a run: its number, what earlier attempts left behind, and where it leaves its own traces.

Where the events of a rank go: a history, the history of whichever member this worker is, or nowhere.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.checkpoint.place import store_at
from holdfast.checkpoint.read_ahead import read_ahead
from holdfast.checkpoint.store import Store
from holdfast.distributed.ranks import JOINS, Ranks
from holdfast.events import Attempt as Began
from holdfast.events import Plan, What
from holdfast.history.log import HistoryWriter
from holdfast.history.tail import PastAttempts, following, had_snapshots, has_commit, read_past
from holdfast.runs.config import RunConfig
from holdfast.runs.lock import Lock, alone


class Recorder(Protocol):
    """Takes events, and keeps them."""

    def append(self, what: What, time: float | None = None) -> None:
        """Remember an event, of now or of an earlier moment."""

    def flush(self) -> None:
        """Hand what is remembered to the system: the death of this process no longer loses it."""

    def sync(self) -> None:
        """Wait until what was flushed is on the disk: a power cut no longer loses it."""

    def close(self) -> None:
        """Flush, sync and end."""


class Enrolled:
    """The record of a worker that may be one member or another, or none: each time that it becomes one it begins anew.

    While it is none, only what it is to train is remembered, to be said again when it becomes one.
    """

    def __init__(self, folder: Path, attempt: int, world: int, seed: int | None = None) -> None:
        self._folder, self._attempt, self._world, self._seed = folder, attempt, world, seed
        self._history: HistoryWriter | None = None
        self._member: int | None = None
        self._plan: Plan | None = None

    def enrol(self, member: int) -> None:
        """From now on we are this member, if we are not already."""
        if self._member == member:
            return
        self.retire()
        self._member = member
        self._history = HistoryWriter(self._folder, f"rank-{member}")
        self._history.append(Began(self._attempt, self._world, member, os.getpid(), self._seed))
        if self._plan:
            self._history.append(self._plan)
        self._history.flush()

    def retire(self) -> None:
        """We are no member any more."""
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


class Unrecorded:
    """The record of a run without a folder: nothing is kept."""

    def append(self, what: What, time: float | None = None) -> None:
        pass

    def flush(self) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


ATTEMPT = "attempt"


@dataclass(frozen=True, slots=True, eq=False)
class AttemptContext:
    """This attempt, as one rank sees it."""

    number: int
    folder: Path  # where the histories of the run are
    past: PastAttempts
    record: Recorder
    store: Store
    keep_last: int
    lock: Lock | None = None  # of whoever has no supervisor that holds it

    def has_commit(self, step: int) -> bool:
        """Whether the commit of this step, the newest that stands, is on record."""
        return has_commit(self.folder, step)

    @property
    def had_snapshots(self) -> bool:
        """Whether earlier attempts had a snapshot to go on from."""
        return had_snapshots(self.folder)


def _joined(folder: Path, out: Path, world: Ranks, config: RunConfig) -> AttemptContext:
    """Be ready to take part in the attempt that is under way."""
    number = int(os.environ["HOLDFAST_ATTEMPT"])
    record = Enrolled(folder, number, world.size, config.seed)
    store = store_at(config.checkpoints or out / "checkpoints")
    return AttemptContext(
        number, folder, PastAttempts(struck=read_past(folder).struck), record, store, config.keep_last
    )


def _record(folder: Path, number: int, world: Ranks, config: RunConfig) -> Recorder:
    """The record of this rank, with its first event."""
    if config.recovery != "restart":
        enrolled = Enrolled(folder, number, world.size, config.seed)
        enrolled.enrol(world.rank)
        return enrolled
    record = HistoryWriter(folder, f"rank-{world.rank}")
    record.append(Began(number, world.size, world.rank, os.getpid(), config.seed))
    record.flush()
    return record


def begin(out: Path, world: Ranks, config: RunConfig) -> AttemptContext:
    """Begin the next attempt in this folder: rank 0 looks at the past, and tells the others what they must know."""
    folder = out / "history"
    if JOINS in os.environ:
        return _joined(folder, out, world, config)
    lock = alone(out) if world.rank == 0 and "HOLDFAST_OUT" not in os.environ else None
    if world.rank == 0:
        past = read_past(folder)
        # A supervisor also counts the attempts that died before they could say so.
        number = max(following(past.attempt, folder), int(os.environ.get("HOLDFAST_ATTEMPT", "1")))
    else:
        number, struck = json.loads(world.hear(ATTEMPT))
        told = frozenset((step, kind, rank, point) for step, kind, rank, point in struck)
        past = PastAttempts(struck=told | read_past(folder).struck)  # a node's own folder tells of what struck there
    record = _record(folder, number, world, config)
    if world.rank == 0:
        record.sync()  # before another rank can say that it is in this attempt: a number is used once
        world.tell(ATTEMPT, json.dumps([number, sorted(past.struck)]))
    store = store_at(config.checkpoints or out / "checkpoints")
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the ranks of a node share its memory
        read_ahead(store)
    return AttemptContext(number, folder, past, record, store, config.keep_last, lock)
