"""One attempt in the folder of a run: its number, what earlier attempts left behind, and where it leaves its own traces."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.place import store_at
from holdfast.checkpoint.read_ahead import read_ahead
from holdfast.checkpoint.store import Store
from holdfast.distributed.ranks import JOINS, World
from holdfast.events import Attempt as Began
from holdfast.history.log import HistoryWriter
from holdfast.history.tail import Past, following, had_snapshots, has_commit, read_past
from holdfast.runs.config import RunConfig
from holdfast.runs.lock import Lock, alone
from holdfast.train.state.record import Enrolled, Record

ATTEMPT = "attempt"


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """This attempt, as one rank sees it."""

    number: int
    folder: Path  # where the histories of the run are
    past: Past
    record: Record
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


def _joined(folder: Path, out: Path, world: World, config: RunConfig) -> Attempt:
    """Be ready to take part in the attempt that is under way."""
    number = int(os.environ["HOLDFAST_ATTEMPT"])
    record = Enrolled(folder, number, world.size, config.seed)
    store = store_at(config.checkpoints or out / "checkpoints")
    return Attempt(number, folder, Past(struck=read_past(folder).struck), record, store, config.keep_last)


def _record(folder: Path, number: int, world: World, config: RunConfig) -> Record:
    """The record of this rank, with its first event."""
    if config.recovery != "restart":
        enrolled = Enrolled(folder, number, world.size, config.seed)
        enrolled.enrol(world.rank)
        return enrolled
    record = HistoryWriter(folder, f"rank-{world.rank}")
    record.append(Began(number, world.size, world.rank, os.getpid(), config.seed))
    record.flush()
    return record


def begin(out: Path, world: World, config: RunConfig) -> Attempt:
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
        past = Past(struck=told | read_past(folder).struck)  # a node's own folder tells of what struck there
    record = _record(folder, number, world, config)
    if world.rank == 0:
        record.sync()  # before another rank can say that it is in this attempt: a number is used once
        world.tell(ATTEMPT, json.dumps([number, sorted(past.struck)]))
    store = store_at(config.checkpoints or out / "checkpoints")
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the ranks of a node share its memory
        read_ahead(store)
    return Attempt(number, folder, past, record, store, config.keep_last, lock)
