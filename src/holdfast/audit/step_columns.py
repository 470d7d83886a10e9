"""The steps of one life of a rank, column by column: a long run has millions, and a number takes eight bytes here."""

import math
from array import array
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from holdfast.events import Step
from holdfast.sampler.digest import Samples

Numbers = NDArray[np.int64]


def shared_part(state: str) -> int:
    """A number for the part of a fingerprint that all ranks share; never 0."""
    return hash(state[: len(state) // 2]) or 1


class Columns:
    """What steps say of themselves, in the order in which they were written.

    A fingerprint is kept as a hash of it, 0 where there is none: which it was matters to nobody, only whether it is
    the same as another.
    """

    def __init__(self) -> None:
        self._step, self._epoch, self._cursor = array("q"), array("q"), array("q")
        self._count, self._digest = array("q"), bytearray()
        self._state, self._shared, self._loss = array("q"), array("q"), array("d")
        self._reduced, self._worked = array("q"), bytearray()

    def add(self, step: Step) -> None:
        """Append a step."""
        self._step.append(step.step)
        self._epoch.append(step.epoch)
        self._cursor.append(step.cursor)
        self._count.append(step.samples.count)
        self._digest += bytes.fromhex(step.samples.digest)
        state = step.state
        self._state.append(0 if state is None else hash(state) or 1)
        self._shared.append(0 if state is None else shared_part(state))
        self._loss.append(math.nan if step.loss is None else step.loss)
        self._reduced.append(step.reduced)
        self._worked.append((step.reduced + step.held > 0) + 2 * (step.stepped > 0))

    def __len__(self) -> int:
        return len(self._step)

    @property
    def last(self) -> int | None:
        """The number of the step that was written last."""
        return self._step[-1] if self._step else None

    @cached_property
    def is_run(self) -> bool:
        """Whether every step is the one after the step before it; asked once all are there."""
        return bool((np.diff(self.step) == 1).all())

    @property
    def step(self) -> Numbers:
        return np.frombuffer(self._step, np.int64)

    @property
    def epoch(self) -> Numbers:
        return np.frombuffer(self._epoch, np.int64)

    @property
    def cursor(self) -> Numbers:
        return np.frombuffer(self._cursor, np.int64)

    @property
    def count(self) -> Numbers:
        """How many samples each step trained."""
        return np.frombuffer(self._count, np.int64)

    @property
    def digest(self) -> NDArray[np.uint64]:
        """The two numbers of each step's digest of samples, a row for each."""
        return np.frombuffer(self._digest, ">u8").reshape(-1, 2).astype(np.uint64)

    @property
    def state(self) -> Numbers:
        """A hash of each step's fingerprint, of what all ranks share and of what is a rank's own."""
        return np.frombuffer(self._state, np.int64)

    @property
    def shared(self) -> Numbers:
        """A hash of that half of each step's fingerprint that all ranks share."""
        return np.frombuffer(self._shared, np.int64)

    @property
    def loss(self) -> NDArray[np.float64]:
        """The loss that was noted, or NaN."""
        return np.frombuffer(self._loss, np.float64)

    @property
    def reduced(self) -> Numbers:
        """How many backward passes were summed over the ranks."""
        return np.frombuffer(self._reduced, np.int64)

    @property
    def passed(self) -> NDArray[np.bool_]:
        """Whether a backward pass was summed or held back."""
        return (np.frombuffer(self._worked, np.uint8) & 1) > 0

    @property
    def worked(self) -> NDArray[np.bool_]:
        """Whether a backward pass was summed or held back, or an optimizer stepped."""
        return np.frombuffer(self._worked, np.uint8) > 0

    @property
    def stepped(self) -> NDArray[np.bool_]:
        """Whether an optimizer stepped."""
        return np.frombuffer(self._worked, np.uint8) > 1

    def samples(self, row: int) -> Samples:
        """What the step in this row trained."""
        return Samples(self._count[row], self._digest[16 * row : 16 * row + 16].hex())
