"""Totals of up to 256 steps, so that the cost of a run is computed without reading each step event."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.events import Event
from holdfast.history.folded import StepRun

LARGEST = 256  # steps of a block

Numbers: TypeAlias = NDArray[np.float64]


class StepBlock(NamedTuple):
    """Consecutive steps of one rank that are read from a segment. `time` is that of the last one."""

    time: float
    run: StepRun

    @property
    def who(self) -> str:
        return self.run.who

    @property
    def what(self) -> "StepBlock":
        """The block itself, as an event has its content here."""
        return self

    @property
    def attempt(self) -> int:
        return self.run.panel.attempt

    @property
    def first(self) -> int:
        """The number of the first step."""
        return self.run.first

    @property
    def steps(self) -> int:
        return self.run.steps

    def column(self, name: str) -> NDArray[Any]:
        return self.run.column(name)

    def part(self, start: int, stop: int) -> "StepBlock":
        """Return the steps with the indices from `start` to `stop` in this block."""
        run = self.run._replace(start=self.run.start + start, stop=self.run.start + stop)
        return StepBlock(float(run.column("time")[-1]), run)


Item: TypeAlias = Event | StepBlock


def blocks_of(run: StepRun, moments: Numbers) -> Iterator[StepBlock]:
    """Divide folded steps into blocks. No other event of the critical path, at the times `moments`, is within a block.

    The first step is a block of its own: it may have been written late, or after a recovery."""
    times = run.column("time")
    whole = StepBlock(float(times[-1]), run)
    cuts = {0, 1, *range(0, len(times), LARGEST), *np.searchsorted(times, moments).tolist(), len(times)}
    if (times[1:] < times[:-1]).any():  # the clock was set back
        cuts = set(range(len(times) + 1))
    for start, stop in pairwise(sorted(cuts)):
        yield whole.part(start, stop)


class KnownSteps:
    """The steps of each attempt that were added."""

    def __init__(self) -> None:
        self._known: dict[int, NDArray[np.bool_]] = {}

    def add(self, attempt: int, first: int, steps: int) -> list[tuple[int, int]]:
        """Add steps, and return which of them are new: (start, stop), counted from the step `first`."""
        known = self._known.get(attempt, np.zeros(0, np.bool_))
        if len(known) < first + steps:
            known = self._known[attempt] = np.concatenate([known, np.zeros(first + steps, np.bool_)])
        of_these = known[first : first + steps]
        edges = np.flatnonzero(np.diff(np.concatenate([[True], of_these, [True]]).astype(np.int8))).tolist()
        of_these[:] = True
        return list(zip(edges[::2], edges[1::2], strict=True))
