"""How far a worker has come, in memory that it shares with its supervisor.

The memory is made before the fork, so a worker tells of its progress by writing a number: no file system, no message
and no second thread is involved, and a supervisor sees it even while the worker holds the interpreter's lock. Without a
supervisor the numbers are written all the same, and nobody reads them.

Where live recovery ends: only a restart of all workers helps, and the supervisor is told so.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from holdfast.errors import WorkerLost

IN_RESERVE = -1
_NUMBERS = 13  # of 8 bytes each
WORDS = 4096  # bytes of last words, behind the numbers


class Phase(IntEnum):
    """What a worker is doing, as far as a deadline for it depends on that."""

    STARTING = 0
    RESTORING = 1
    TRAINING = 2
    SAVING = 3  # training waits for a save
    CLOSING = 4  # the last save, and what comes after it
    DONE = 5  # nothing is left to train
    ENDED = 6  # nor of the script: what is left is to go
    RECOVERING = 7  # members were lost, and those that are left find together again
    JOINING = 8  # ready to take the place of a lost one


class Progress:
    """The numbers of one worker: written by it, read by its supervisor."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * _NUMBERS + WORDS)  # shared with whoever is forked from now on
        self._numbers = memoryview(self._memory)[: 8 * _NUMBERS].cast("q")

    @property
    def boundaries(self) -> int:
        """How many step boundaries it has passed in this life."""
        return self._numbers[0]

    @property
    def step(self) -> int | None:
        """The window that it is training, or trained last; nothing before the first."""
        return self._numbers[1] - 1 if self._numbers[1] else None

    @property
    def posted(self) -> int:
        """How many exchanges it has begun since the last boundary: whoever waits for a peer has begun more than the peer."""
        return self._numbers[2]

    @property
    def moved(self) -> int:
        """How many bytes its saves and restores have moved, and what it has handed to other ranks or got from them."""
        return self._numbers[3]

    @property
    def phase(self) -> Phase:
        """What it is doing."""
        return Phase(self._numbers[4])

    @property
    def status(self) -> int | None:
        """The exit status that it is about to end with, once its script has ended in order."""
        return self._numbers[5] - 1 if self._numbers[5] else None

    @property
    def membership(self) -> int:
        """The number of the membership that it is in; 0 is that of the start, and `IN_RESERVE` is none."""
        return self._numbers[6]

    @property
    def suspected(self) -> int | None:
        """The number of the last membership in which it found a connection broken."""
        return self._numbers[7] - 1 if self._numbers[7] else None

    @property
    def has_fallen_back(self) -> bool:
        """Whether it has found that live recovery is not possible, and only a restart helps."""
        return bool(self._numbers[8])

    @property
    def evaluated(self) -> int:
        """How much it has evaluated between steps, or after them: any sign that it goes on with it."""
        return self._numbers[9]

    @property
    def is_checked(self) -> bool:
        """Whether its steps are those of a run, which are saved and on record; else it is supervised and no more."""
        return bool(self._numbers[10])

    @property
    def has_exchanged(self) -> bool:
        """Whether its script exchanges by torch.distributed itself, so that the others cannot go on without a lost one."""
        return bool(self._numbers[11])

    @property
    def is_up(self) -> bool:
        """Whether it has begun, and nothing that its fork took along keeps it from going on."""
        return bool(self._numbers[12])

    @property
    def is_in_its_loop(self) -> bool:
        """Whether it has begun the loop of a run and not said that the run has ended, or was stopped, for it."""
        return self.is_checked and self.step is not None and self.phase not in (Phase.DONE, Phase.ENDED)

    @property
    def last_words(self) -> str:
        """What it said of its failure, where the disk may have refused it."""
        text = bytes(self._memory[8 * _NUMBERS :])
        return text.rstrip(b"\0").decode(errors="replace")

    def passes(self, step: int) -> None:
        """A boundary is behind us, and this window is next."""
        self._numbers[2] = 0  # first: to be seen behind for a moment is nothing
        self._numbers[0] += 1
        self._numbers[1] = step + 1

    def catches_up(self, boundaries: int, posted: int) -> None:
        """We are as far as our peers, without having done what they have."""
        self._numbers[0], self._numbers[2] = boundaries, posted

    def regroups(self, number: int) -> None:
        """We are in the membership with this number."""
        self._numbers[6] = number

    def suspects(self, number: int) -> None:
        """A connection among the members of this number broke."""
        self._numbers[7] = number + 1

    def falls_back(self) -> None:
        """Only a restart helps."""
        self._numbers[8] = 1

    def evaluates(self) -> None:
        """An evaluation goes on; a process that loads for it may say so, too."""
        self._numbers[9] += 1

    def checks(self) -> None:
        """The steps from here on are those of a run."""
        self._numbers[10] = 1

    def exchanges(self) -> None:
        """The script exchanges by torch.distributed itself."""
        self._numbers[11] = 1

    def comes_up(self) -> None:
        """We have begun."""
        self._numbers[12] = 1

    def posts(self) -> None:
        """What we do next ends only once all peers have come as far."""
        self._numbers[2] += 1

    def moves(self, count: int) -> None:
        """So many more bytes were saved or restored."""
        self._numbers[3] += count

    def enters(self, phase: Phase) -> None:
        """From now on we are doing this."""
        self._numbers[4] = phase

    def ends(self, status: int) -> None:
        """The script has ended in order, with this exit status."""
        self._numbers[5] = status + 1
        self.enters(Phase.ENDED)

    def says(self, words: str) -> None:
        """Leave last words that reach the supervisor whatever becomes of the disk."""
        self._memory[8 * _NUMBERS :] = words.encode()[:WORDS].ljust(WORDS, b"\0")


here = Progress()
"""This process's own; a worker of a supervisor takes the one that was made for it by `adopt`."""


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Do something that has a phase of its own; afterwards we are doing again what we did before."""
    before = here.phase
    if before != Phase.CLOSING:  # a save within it is a part of it
        here.enters(phase)
    try:
        yield
    finally:
        here.enters(before)


def adopt(progress: Progress) -> None:
    """Tell of our progress here from now on."""
    global here
    here = progress


def fallen_back(why: str) -> WorkerLost:
    """Say, to the supervisor too, that only a restart helps."""
    here.falls_back()
    return WorkerLost(f"{why}: the run starts again from its newest snapshot")
