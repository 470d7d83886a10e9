"""Where the events of a rank go: a history, the history of whichever member this worker is, or nowhere."""

import os
from pathlib import Path
from typing import Protocol

from holdfast.events import Attempt, Plan, What
from holdfast.history.log import HistoryWriter


class Record(Protocol):
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
        self._history.append(Attempt(self._attempt, self._world, member, os.getpid(), self._seed))
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
