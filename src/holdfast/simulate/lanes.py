"""Trials in one process: many of them advance together, each in a lane of one stack.

A stack has a fixed number of lanes. A trial that reaches the criterion leaves its lane to the next one, and lanes
without a trial are padded, so every matrix product has the same shape and a trial's result depends neither on its
company nor on the number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks import Floats
from holdfast.workloads.workload import Arrays, Clock, Workload, stacked

Trial = TypeVar("Trial")
Done: TypeAlias = Callable[[int, float], None]
"""Told the number of a trial that is done, and its iterations."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where a trial begins: a state, the iteration that is next, and the stream of random numbers that it follows."""

    state: Arrays
    iteration: int
    stream: int = 0


def run_lanes(
    workload: Workload, trials: Sequence[Trial], begin: Callable[[Trial], Start], limit: int, done: Done
) -> Floats:
    """Run trials in as many stacks of lanes as it takes."""
    result = np.full(len(trials), np.inf)

    def note(trial: int, count: float) -> None:
        result[trial] = count
        done(trial, count)

    with threadpool_limits(1):  # the number of threads would show in the last bits
        waiting = _not_there_yet(workload, trials, begin, note)
        lanes = _Lanes(workload, trials, begin, iter(list(waiting)))
        while lanes.occupied:
            lanes.advance(limit, note)
    return result


def _not_there_yet(
    workload: Workload, trials: Sequence[Trial], begin: Callable[[Trial], Start], note: Done
) -> Iterator[int]:
    """The trials that do not start under the criterion; those that do are noted."""
    for first in range(0, len(trials), workload.lanes):
        states = [begin(trial).state for trial in trials[first : first + workload.lanes]]
        padded = [*states, *[states[0]] * (workload.lanes - len(states))]
        for offset, loss in enumerate(workload.loss(stacked(padded))[: len(states)]):
            if loss < workload.criterion:
                note(first + offset, 0)
            else:
                yield first + offset


class _Lanes(Generic[Trial]):
    """The trials that are under way, one in each lane of a stack; `None` marks a lane that only pads."""

    def __init__(
        self, workload: Workload, trials: Sequence[Trial], begin: Callable[[Trial], Start], waiting: Iterator[int]
    ) -> None:
        self._workload, self._trials, self._begin, self._waiting = workload, trials, begin, waiting
        self._current = [next(waiting, None) for _ in range(workload.lanes)]
        if not self.occupied:
            return
        starts = [self._start(trial) for trial in self._current]
        self._stack = stacked([start.state for start in starts])
        self._iteration = np.array([start.iteration for start in starts])
        self._stream = np.array([start.stream for start in starts])
        self._age = np.zeros(workload.lanes, dtype=np.int64)

    @property
    def occupied(self) -> bool:
        """Whether any trial is still under way."""
        return any(trial is not None for trial in self._current)

    def advance(self, limit: int, note: Done) -> None:
        """One iteration of every lane; trials that are there, or at the limit, make room for the next."""
        self._stack = self._workload.advance(self._stack, Clock(self._iteration + self._age, self._stream))
        self._age += 1
        under = self._workload.loss(self._stack) < self._workload.criterion
        for lane, trial in enumerate(self._current):
            if trial is not None and (under[lane] or self._age[lane] >= limit):
                note(trial, float(self._age[lane]) if under[lane] else np.inf)
                self._enter(lane, next(self._waiting, None))

    def _enter(self, lane: int, trial: int | None) -> None:
        self._current[lane] = trial
        if trial is None:
            return  # the lane goes on with what it has, as padding
        start = self._start(trial)
        for name, value in start.state.items():
            self._stack[name][..., lane] = value
        self._iteration[lane], self._stream[lane], self._age[lane] = start.iteration, start.stream, 0

    def _start(self, trial: int | None) -> Start:
        occupant = trial if trial is not None else next(other for other in self._current if other is not None)
        return self._begin(self._trials[occupant])
