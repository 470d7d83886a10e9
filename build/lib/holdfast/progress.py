"""The progress of a worker, in memory that it shares with its supervisor.

The memory is allocated before the fork, so a worker reports progress by writing a number, without a file, a message or
a second thread. The supervisor sees the number even while the worker holds the GIL. A worker without a supervisor
writes the numbers, too, and no process reads them.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Generic, TypeVar

from holdfast.errors import WorkerLost

IN_RESERVE = -1
_NUMBERS = 17  # of 8 bytes each
WORDS = 4096  # bytes of last words, behind the numbers
OWN_TIMES = 256  # steps whose own times are kept, behind the last words
_LONGEST = (1 << 32) - 1  # microseconds
T = TypeVar("T")


class Phase(IntEnum):
    """The current activity of a worker, which determines how long its supervisor waits for progress."""

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    SAVING = 3  # training waits for a save
    CLOSING = 4  # the last save, and what comes after it
    DONE = 5  # nothing is left to train
    ENDED = 6  # the script has ended as well
    RECOVERING = 7  # members were lost, and the survivors recover
    JOINING = 8  # ready to take the place of a lost member, or of the present attempt


class _Number(Generic[T]):
    """A descriptor of the number at `index` in shared memory; `kind` converts the number when it is read."""

    def __init__(self, index: int, kind: Callable[[int], T]) -> None:
        self._index, self._kind = index, kind

    def __get__(self, progress: "Progress", _: type["Progress"]) -> T:
        return self._kind(progress.numbers[self._index])

    def __set__(self, progress: "Progress", value: int) -> None:
        progress.numbers[self._index] = value


class _NumberOrNone(_Number[int | None]):
    """A descriptor of a number that may be unknown; it is stored with 1 added, and 0 means None."""

    def __init__(self, index: int) -> None:
        super().__init__(index, lambda number: number - 1 if number else None)

    def __set__(self, progress: "Progress", value: int) -> None:
        super().__set__(progress, value + 1)


class Progress:
    """Shared memory in which a worker writes numbers about its progress, for its supervisor to read."""

    boundaries = _Number(0, int)  # the number of step boundaries that this process has passed
    step = _NumberOrNone(1)  # the step that is being trained or was trained last; None before the first step
    posted = _Number(2, int)  # exchanges with peers since the last boundary; a rank that waits is ahead of its peer
    moved = _Number(3, int)  # the bytes that saves, restores and transfers between ranks have moved
    phase = _Number(4, Phase)  # the current activity of the worker
    status = _NumberOrNone(5)  # the exit status that the worker is about to end with, once its script has ended
    membership = _Number(6, int)  # the number of the set of training workers that it is in; `IN_RESERVE` if in none
    suspected = _NumberOrNone(7)  # the number of the last membership in which a connection broke
    has_fallen_back = _Number(8, bool)  # live recovery is impossible, and only a restart helps
    evaluated = _Number(9, int)  # a count that grows while the worker evaluates, between steps or after them
    is_checked = _Number(10, bool)  # the worker runs a loop of holdfast, whose steps are recorded and saved
    has_exchanged = _Number(11, bool)  # the script calls torch.distributed itself, so a loss needs a restart
    assigned = _NumberOrNone(13)  # the rank that it has for life, set by the supervisor for a replacement
    asks_for_rank = _Number(14, bool)  # a spare waits for its rank, which its script has asked for
    is_up = _Number(12, bool)  # the worker has begun, so that no lock inherited by the fork blocks it
    is_only_supervised = _Number(15, bool)  # the script trains outside of `run.batches`: its steps are not counted
    is_standby = _Number(16, bool)  # it belongs to the next attempt, and waits in `run.protect` until that starts

    def __init__(self) -> None:
        begin = 8 * _NUMBERS + WORDS
        self._memory = mmap.mmap(-1, begin + 8 * OWN_TIMES)  # shared with processes that are forked from now on
        self.numbers = memoryview(self._memory)[: 8 * _NUMBERS].cast("q")
        self._own_times = memoryview(self._memory)[begin:].cast("q")

    @property
    def is_in_its_loop(self) -> bool:
        """True from the first step of the training loop until the worker has reported that it is done."""
        return self.is_checked and self.step is not None and self.phase not in (Phase.DONE, Phase.ENDED)

    @property
    def last_words(self) -> str:
        """The worker's last message about its failure. It needs no file, so it arrives even if the disk is full."""
        return bytes(self._memory[8 * _NUMBERS : 8 * _NUMBERS + WORDS]).rstrip(b"\0").decode(errors="replace")

    def pass_boundary(self, step: int) -> None:
        """Report that this worker begins `step`."""
        self.posted = 0  # first: to appear behind for a moment does no harm
        self.boundaries += 1
        self.step = step

    def catch_up(self, boundaries: int, posted: int) -> None:
        """Set the counts of begun steps and collectives to the counts of another worker, whose state was copied."""
        self.boundaries, self.posted = boundaries, posted

    @contextmanager
    def asking_for_rank(self) -> Iterator[None]:
        """Report, inside this context, that the worker waits for a rank from its supervisor."""
        self.asks_for_rank = True
        try:
            yield
        finally:
            self.asks_for_rank = False

    def report_own_time(self, step: int, seconds: float) -> None:
        """Report how long this worker computed its own part of `step`, without its waits for other workers."""
        self._own_times[step % OWN_TIMES] = (step + 1) << 32 | min(int(1e6 * seconds), _LONGEST)

    def own_time(self, step: int) -> float | None:
        """Return the seconds that the worker computed its own part of `step`; None if they are not known."""
        number = self._own_times[step % OWN_TIMES]
        return (number & _LONGEST) / 1e6 if number >> 32 == step + 1 else None

    def count_evaluation(self) -> None:
        """Report that an evaluation makes progress. The worker's data-loading processes may call this too."""
        self.evaluated += 1

    def count_post(self) -> None:
        """Count one more collective operation that this worker has begun; in it, the worker may wait for others."""
        self.posted += 1

    def add_moved(self, count: int) -> None:
        """Report that `count` more bytes were saved, restored or transferred."""
        self.moved += count

    def end(self, status: int) -> None:
        """Report that the script has ended, with the exit status `status`."""
        self.status, self.phase = status, Phase.ENDED

    def leave_words(self, words: str) -> None:
        self._memory[8 * _NUMBERS : 8 * _NUMBERS + WORDS] = words.encode()[:WORDS].ljust(WORDS, b"\0")


here = Progress()  # the progress of this process; a supervised worker replaces it with `adopt`


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Report `phase` to the supervisor inside this context, and the previous phase again afterwards."""
    before = here.phase
    if before != Phase.CLOSING:  # a save while closing is part of it
        here.phase = phase
    try:
        yield
    finally:
        here.phase = before


def adopt(progress: Progress) -> None:
    """Write the progress of this worker into `progress` from now on; the supervisor shares its memory."""
    global here
    here = progress


def restart_needed(why: str) -> WorkerLost:
    """Tell the supervisor that the run must restart because of `why`, and return the error to raise."""
    here.has_fallen_back = True
    return WorkerLost(f"{why}: the run restarts from its newest snapshot.")
