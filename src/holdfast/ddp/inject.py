"""Strikes the failures of a schedule: each once in the life of a run folder, on record before it strikes.

Those of processes strike here, at a boundary. Those of storage strike in the store, when the next save gets there.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from holdfast.checkpoint.faulty import KINDS, Faulty
from holdfast.checkpoint.store import Store
from holdfast.ddp.past import INJECTED, Struck
from holdfast.errors import BadInput
from holdfast.events import Strike
from holdfast.failure import Failure, Schedule
from holdfast.history import HistoryWriter

STORAGE = "storage"
SLOW_SECONDS = 1.0


class Injection:
    """The failures that are to strike this rank."""

    def __init__(
        self, schedule: Schedule, rank: int, attempt: int, struck: Collection[Struck], folder: Path | None
    ) -> None:
        mine = [failure for failure in schedule if failure.kind in ACTS and rank in (failure.targets or (0,))]
        self._due = [failure for failure in mine if (failure.step, failure.kind, rank) not in struck]
        self._steps = {failure.step for failure in schedule if failure.kind in ACTS}
        self._rank, self._attempt, self._folder = rank, attempt, folder

    def is_near(self, step: int) -> bool:
        """Whether something may happen before the window with this number, to this rank or to another."""
        return step in self._steps

    def strike(self, step: int) -> None:
        """Let happen what is due before the window with this number; it may not return."""
        for failure in [each for each in self._due if each.step == step]:
            self._due.remove(failure)
            if self._folder:
                _tell(self._folder, str(self._rank), Strike(self._attempt, step, failure.kind, self._rank))
            ACTS[failure.kind](failure)


def faulty(store: Store, schedule: Schedule, attempt: int, struck: Collection[Struck], folder: Path) -> Store:
    """The store with the faults of storage that have not struck yet; without any, the store itself."""
    faults = tuple(fault for fault in schedule if fault.kind in KINDS and (fault.step, fault.kind, 0) not in struck)
    if not faults:
        return store

    def tell(fault: Failure) -> None:
        _tell(folder, STORAGE, Strike(attempt, fault.step, fault.kind, 0, fault.point))

    return Faulty(store, faults, tell=tell)


def _tell(folder: Path, who: str, strike: Strike) -> None:
    """Put a strike on record in a small file of its own, of which the next attempt reads all."""
    with HistoryWriter(folder, f"{INJECTED}{who}") as record:
        record.append(strike)


def check(schedule: Schedule, steps: int) -> None:
    """Refuse a failure that can never happen; after the last step there is a last save."""
    if late := [each.step for each in schedule if each.step >= steps + (each.kind in KINDS)]:
        several = ", ".join(str(step) for step in sorted(set(late)))
        raise BadInput(f"no failure can strike before step {several}: the last of this run is step {steps - 1}")


def _exit(_: Failure) -> None:
    os._exit(137)


def _kill(_: Failure) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(_: Failure) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(_: Failure) -> None:
    time.sleep(SLOW_SECONDS)


ACTS: Mapping[str, Callable[[Failure], None]] = {"exit": _exit, "kill": _kill, "hang": _hang, "slow": _slow}
