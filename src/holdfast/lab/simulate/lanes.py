"""Trials in one process: many of them advance together, as one stack of arrays whose last axis is the trial.

In go a workload and the state in which each trial starts; out comes how many iterations each needs to the criterion.

A lane is one place on the last axis of a stack. A stack has a fixed number of them. A trial that reaches the criterion
leaves its lane to the next trial, and a lane without a trial holds a copy of another, so every matrix product has the
same shape: the result of a trial depends neither on the trials beside it nor on the number of processes.

Iterations are counted in fractions: where within the last one the loss, as a straight line, meets the criterion. A
failure that costs a tenth of an iteration would else cost 0 or 1 by chance. The whole count is the next whole number.

How many iterations trials need from where they start to the criterion, in as many processes as one likes.

In go a workload and descriptions of trials; out comes one number for each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks.division import Floats, Ids
from holdfast.lab.simulate.process_pool import Report, map_in_processes
from holdfast.lab.simulate.trajectory import crossing
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, stacked, unstacked

Description = TypeVar("Description")  # of a trial, from which its start is made when a lane is free
Done: TypeAlias = Callable[[int, float], None]
"""Told the number of a trial that is done, and its iterations."""

LOOK = 4  # states whose loss is computed together where only some are looked at


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Where a trial begins: a state, the iteration that is next, and the stream of random numbers that it follows."""

    state: Arrays
    iteration: int
    stream: int = 0


def run_lanes(
    workload: Workload, trials: Sequence[Description], begin: Callable[[Description], Start], limit: int, done: Done
) -> Floats:
    """The iterations of every trial to the criterion, in fractions; infinite for one that is not there within the limit."""
    result = np.full(len(trials), np.inf)

    def note(trial: int, count: float) -> None:
        result[trial] = count
        done(trial, count)

    with threadpool_limits(1):  # the number of threads would show in the last bits
        losses, iterations = _starts(workload, trials, begin)
        for trial in np.flatnonzero(losses < workload.criterion):
            note(int(trial), 0)
        # Those that start early take longest: begun first, they leave no lane to work alone in the end.
        order = np.argsort(iterations, kind="stable")
        waiting = iter(order[~(losses[order] < workload.criterion)].tolist())
        lanes = _Lanes(workload, losses, lambda trial: begin(trials[trial]), waiting)
        while lanes.occupied:
            lanes.advance(limit, note)
    return result


def _starts(
    workload: Workload, trials: Sequence[Description], begin: Callable[[Description], Start]
) -> tuple[Floats, Ids]:
    """The loss and the iteration with which every trial starts."""
    losses, iterations = np.zeros(len(trials)), np.zeros(len(trials), dtype=np.int64)
    for first in range(0, len(trials), workload.lanes):
        part = slice(first, first + workload.lanes)
        starts = [begin(trial) for trial in trials[part]]
        losses[part] = _losses(workload, [start.state for start in starts])
        iterations[part] = [start.iteration for start in starts]
    return losses, iterations


def _losses(workload: Workload, states: Sequence[Arrays]) -> Floats:
    """The losses of some states, in stacks of one width, so that a loss does not depend on how many are asked for."""
    width = min(LOOK, workload.lanes) if workload.steady else workload.lanes
    found = []
    for first in range(0, len(states), width):
        part = states[first : first + width]
        found.append(workload.loss(stacked([*part, *[part[0]] * (width - len(part))]))[: len(part)])
    return np.concatenate(found)


class _Lanes:
    """The trials that are under way, one in each lane of a stack; `None` marks a lane that only pads.

    The loss of a lane is looked at when it is due: at every iteration, or, if the workload is steady, not before four
    fifths of the way to the criterion at the present slope. Where a look finds the criterion passed, the iteration
    before must be above it; else the slope has misled us, and the trial is run again with a look at every iteration.
    """

    def __init__(
        self, workload: Workload, start_losses: Floats, begin: Callable[[int], Start], waiting: Iterator[int]
    ) -> None:
        self._workload, self._start_losses, self._begin, self._waiting = workload, start_losses, begin, waiting
        self._current = [next(waiting, None) for _ in range(workload.lanes)]
        if not self.occupied:
            return
        padding = next(trial for trial in self._current if trial is not None)
        starts = [begin(padding if trial is None else trial) for trial in self._current]
        self._stack = stacked([start.state for start in starts])
        self._iteration = np.array([start.iteration for start in starts])
        self._stream = np.array([start.stream for start in starts])
        self._age = np.zeros(workload.lanes, dtype=np.int64)
        self._careful = np.full(workload.lanes, not workload.steady)
        self._seen_at = np.zeros(workload.lanes, dtype=np.int64)
        self._seen = np.array([np.nan if trial is None else start_losses[trial] for trial in self._current])
        self._due = np.ones(workload.lanes, dtype=np.int64)

    @property
    def occupied(self) -> bool:
        """Whether any trial is still under way."""
        return any(trial is not None for trial in self._current)

    def advance(self, limit: int, note: Done) -> None:
        """One iteration of every lane; trials that are there, or at the limit, make room for the next."""
        before = self._stack
        self._stack = self._workload.advance(before, Clock(self._iteration + self._age, self._stream))
        self._age += 1
        due = [
            lane
            for lane, trial in enumerate(self._current)
            if trial is not None and (self._age[lane] >= self._due[lane] or self._age[lane] >= limit)
        ]
        if due:
            for lane, loss in zip(due, self._look(self._stack, due), strict=True):
                self._judge(lane, float(loss), before, limit, note)

    def _look(self, stack: Stack, lanes: Sequence[int]) -> Floats:
        if not self._workload.steady:  # nearly all lanes are due at every iteration
            return np.asarray(self._workload.loss(stack)[lanes])
        return _losses(self._workload, [unstacked(stack, lane) for lane in lanes])

    def _judge(self, lane: int, loss: float, before: Stack, limit: int, note: Done) -> None:
        trial, age = self._current[lane], int(self._age[lane])
        assert trial is not None
        criterion = self._workload.criterion
        if not loss < criterion and age < limit:
            self._schedule(lane, loss)
            return
        previous = self._previous(lane, before) if loss < criterion else np.inf
        if previous < criterion:
            self._enter(lane, trial, careful=True)
            return
        note(trial, age - 1 + crossing(previous, loss, criterion) if loss < criterion else np.inf)
        self._enter(lane, next(self._waiting, None), careful=not self._workload.steady)

    def _previous(self, lane: int, before: Stack) -> float:
        """The loss of a lane one iteration ago."""
        return float(self._seen[lane] if self._seen_at[lane] == self._age[lane] - 1 else self._look(before, [lane])[0])

    def _schedule(self, lane: int, loss: float) -> None:
        """When to look next: four fifths of the way to the criterion, if the loss goes on falling as it did."""
        steps = self._age[lane] - self._seen_at[lane]
        slope = (self._seen[lane] - loss) / steps
        ahead = 0.8 * (loss - self._workload.criterion) / slope if slope > 0 and not self._careful[lane] else 1
        self._seen[lane], self._seen_at[lane] = loss, self._age[lane]
        self._due[lane] = self._age[lane] + max(1, int(min(ahead, 1e6)))

    def _enter(self, lane: int, trial: int | None, *, careful: bool) -> None:
        self._current[lane] = trial
        if trial is None:
            return  # the lane goes on with what it has, as padding
        start = self._begin(trial)
        for name, value in start.state.items():
            self._stack[name][..., lane] = value
        self._iteration[lane], self._stream[lane], self._age[lane] = start.iteration, start.stream, 0
        self._careful[lane], self._seen_at[lane], self._due[lane] = careful, 0, 1
        self._seen[lane] = self._start_losses[trial]


def start_as_given(start: Start) -> Start:
    """For trials that are described by their starts."""
    return start


def iterations_to_criterion(
    workload: Workload,
    trials: Sequence[Description],
    begin: Callable[[Description], Start],
    *,
    limit: int,
    jobs: int = 1,
    done: Done = lambda trial, count: None,
) -> Floats:
    """Iterations of each trial to the criterion, in fractions; infinite for one that is not there within the limit.

    A trial is a small description, and `begin` makes its start only when a lane is free: a thousand states of a large
    model never exist at once, nor do they travel between processes.
    """
    if jobs == 1 or len(trials) <= workload.lanes:
        return run_lanes(workload, trials, begin, limit, done)
    parts = [range(first, len(trials), jobs) for first in range(min(jobs, len(trials)))]
    work = _Part(workload, begin, limit)
    counts = map_in_processes(work, [[(i, trials[i]) for i in part] for part in parts], jobs=jobs, hear=done)
    result = np.full(len(trials), np.inf)
    for part, found in zip(parts, counts, strict=True):
        result[part] = found
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some of the trials, each with its number among all."""

    workload: Workload
    begin: Callable[[Any], Start]
    limit: int

    def __call__(self, part: Sequence[tuple[int, Any]], tell: Report) -> Floats:
        numbers, trials = zip(*part, strict=True)
        return run_lanes(
            self.workload, trials, self.begin, self.limit, lambda trial, count: tell(numbers[trial], count)
        )
