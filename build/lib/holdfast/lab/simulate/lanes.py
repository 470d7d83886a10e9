"""Run workloads to their convergence criterion: runs without failures, and many trials at once.

Trials advance together as one stack of arrays, whose last axis is the lane; each lane holds one trial. The number of
lanes is fixed, with copies of other trials as padding, so that a result depends neither on the other trials nor on the
number of processes. Iterations are counted in fractions: within the last iteration, the loss is interpolated linearly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.lab.simulate.pools import Report, map_in_processes
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, stacked, unstacked

Description = TypeVar("Description")  # of a trial; its start is computed from it when a lane is free
TrialDone: TypeAlias = Callable[[int, float], None]
"""Called with the number of a finished trial and its iterations."""

WIDTH = 4  # states whose loss is computed together, where only some lanes are due


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The states and losses of a run, from the start to the first iteration whose loss is below the criterion."""

    states: list[Arrays]
    losses: Floats

    @property
    def length(self) -> int:
        return len(self.states) - 1

    def crossed(self, criterion: float) -> float:
        """Return after how many iterations, as a fractional number, the interpolated loss reaches `criterion`."""
        before, after = map(float, self.losses[-2:])
        return self.length - 1 + crossing(before, after, criterion)


def crossing(before: float, after: float, criterion: float) -> float:
    """Return the fraction of an iteration after which a loss that falls from `before` to `after` reaches `criterion`."""
    if not np.isfinite(before):
        return 1.0
    return max((before - criterion) / (before - after), 1e-9)  # above 0: the iteration before did not reach it


def trajectory(
    workload: Workload, *, limit: int = 10_000, progress: Callable[[int], None] = lambda done: None
) -> Trajectory:
    """Train a workload without failures until it converges, in at most `limit` iterations, with random seed 0."""
    return _runs(workload, [0], 1, limit, progress)[0]


def trajectories(workload: Workload, streams: Sequence[int], *, limit: int = 10_000) -> list[Trajectory]:
    """Train a workload until convergence once for each random seed in `streams`, all in one batch."""
    padding = [streams[0]] * (workload.lanes - len(streams))
    return _runs(workload, [*streams, *padding], len(streams), limit, lambda done: None)


def _runs(
    workload: Workload, streams: Sequence[int], wanted: int, limit: int, progress: Callable[[int], None]
) -> list[Trajectory]:
    """Train with all random seeds `streams` at once; return the runs of the first `wanted` seeds, up to convergence."""
    stack = stacked([workload.start(stream) for stream in streams])
    states: list[list[Arrays]] = [[] for _ in range(wanted)]
    losses: list[list[float]] = [[] for _ in range(wanted)]
    under_way, iteration = list(range(wanted)), 0
    with threadpool_limits(1):  # the number of threads changes the last bits
        while under_way:
            loss = workload.loss(stack)
            for lane in under_way:
                states[lane].append(unstacked(stack, lane))
                losses[lane].append(float(loss[lane]))
            under_way = [lane for lane in under_way if not loss[lane] < workload.criterion]
            if under_way and iteration == limit:
                raise BadInput(
                    f"{workload.name} is not below its criterion {workload.criterion:g} after {limit} iterations "
                    f"(loss {losses[under_way[0]][-1]:g}): raise the criterion or the limit."
                )
            if under_way:
                stack = workload.advance(stack, Clock(np.full(len(streams), iteration), np.array(streams)))
                iteration += 1
                progress(1)
    return [Trajectory(*run) for run in zip(states, map(np.array, losses), strict=True)]


def continue_training(
    workload: Workload, state: Arrays, first: int, last: int, *, progress: Callable[[int], None] = lambda done: None
) -> Arrays:
    """Train from `state` at iteration `first` to iteration `last`, with random seed 0, and return the final state."""
    stack = stacked([state])
    with threadpool_limits(1):
        for iteration in range(first, last):
            stack = workload.advance(stack, Clock(np.array([iteration]), np.array([0])))
            progress(1)
    return unstacked(stack, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The start of a trial: a state, the number of the next iteration, and a random seed."""

    state: Arrays
    iteration: int
    stream: int = 0


def run_lanes(
    workload: Workload,
    trials: Sequence[Description],
    begin: Callable[[Description], Start],
    limit: int,
    done: TrialDone,
) -> Floats:
    """Run the trials, several at a time, and return the number of iterations that each needs to converge.

    `begin` computes the start of a trial. `done` is called with the index of a trial and its number of iterations,
    which is infinite if the trial does not converge within `limit` iterations."""
    result = np.full(len(trials), np.inf)

    def finish(trial: int, count: float) -> None:
        result[trial] = count
        done(trial, count)

    with threadpool_limits(1):  # the number of threads changes the last bits
        losses, iterations = np.zeros(len(trials)), np.zeros(len(trials), dtype=np.int64)
        for first in range(0, len(trials), workload.lanes):
            part = slice(first, first + workload.lanes)
            starts = [begin(trial) for trial in trials[part]]
            losses[part] = _losses(workload, [start.state for start in starts])
            iterations[part] = [start.iteration for start in starts]
        for trial in np.flatnonzero(losses < workload.criterion):
            finish(int(trial), 0)
        # Trials that start early take longest: begun first, they do not leave one lane working alone at the end.
        order = np.argsort(iterations, kind="stable")
        waiting = iter(order[~(losses[order] < workload.criterion)].tolist())
        lanes = _Lanes(workload, losses, lambda trial: begin(trials[trial]), waiting)
        while lanes.occupied:
            lanes.advance(limit, finish)
    return result


def _losses(workload: Workload, states: Sequence[Arrays]) -> Floats:
    """Return the losses of `states`, computed in batches of fixed size so that equal states have equal losses."""
    width = min(WIDTH, workload.lanes) if workload.steady else workload.lanes
    losses = []
    for first in range(0, len(states), width):
        part = states[first : first + width]
        losses.append(workload.loss(stacked([*part, *[part[0]] * (width - len(part))]))[: len(part)])
    return np.concatenate(losses)


class _Lanes:
    """The running trials, whose arrays are stacked so that one call trains all of them; each trial has one slot (lane).

    The loss of a trial is computed in every iteration. Only if the workload is `steady`, so that its loss falls ever
    more slowly, some iterations are skipped: how many is predicted from the slope of the loss. If the loss met the
    criterion in a skipped iteration, the trial runs again with its loss computed in every iteration."""

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
        return any(trial is not None for trial in self._current)

    def advance(self, limit: int, finish: TrialDone) -> None:
        """Train all running trials for one iteration.

        Call `finish` for each trial that converges or reaches `limit`."""
        before = self._stack
        self._stack = self._workload.advance(before, Clock(self._iteration + self._age, self._stream))
        self._age += 1
        due = [
            lane
            for lane, trial in enumerate(self._current)
            if trial is not None and (self._age[lane] >= self._due[lane] or self._age[lane] >= limit)
        ]
        if due:
            for lane, loss in zip(due, self._losses(self._stack, due), strict=True):
                self._check(lane, float(loss), before, limit, finish)

    def _losses(self, stack: Stack, lanes: Sequence[int]) -> Floats:
        if not self._workload.steady:  # nearly all lanes are due at every iteration
            return np.asarray(self._workload.loss(stack)[lanes])
        return _losses(self._workload, [unstacked(stack, lane) for lane in lanes])

    def _check(self, lane: int, loss: float, before: Stack, limit: int, finish: TrialDone) -> None:
        trial, age = self._current[lane], int(self._age[lane])
        assert trial is not None
        criterion = self._workload.criterion
        if not loss < criterion and age < limit:
            # Due again four fifths of the way to the criterion, if the loss keeps falling at this slope.
            slope = (self._seen[lane] - loss) / (age - self._seen_at[lane])
            ahead = 0.8 * (loss - criterion) / slope if slope > 0 and not self._careful[lane] else 1
            self._seen[lane], self._seen_at[lane] = loss, age
            self._due[lane] = age + max(1, int(min(ahead, 1e6)))
            return
        previous = np.inf
        if loss < criterion:
            is_known = self._seen_at[lane] == age - 1
            previous = float(self._seen[lane] if is_known else self._losses(before, [lane])[0])
        if previous < criterion:
            self._enter(lane, trial, careful=True)
            return
        finish(trial, age - 1 + crossing(previous, loss, criterion) if loss < criterion else np.inf)
        self._enter(lane, next(self._waiting, None), careful=not self._workload.steady)

    def _enter(self, lane: int, trial: int | None, *, careful: bool) -> None:
        self._current[lane] = trial
        if trial is None:
            return  # the lane keeps its state, as padding
        start = self._begin(trial)
        for name, value in start.state.items():
            self._stack[name][..., lane] = value
        self._iteration[lane], self._stream[lane], self._age[lane] = start.iteration, start.stream, 0
        self._careful[lane], self._seen_at[lane], self._due[lane] = careful, 0, 1
        self._seen[lane] = self._start_losses[trial]


def start_as_given(start: Start) -> Start:
    """Return `start` unchanged. Pass this function as `begin` if the trials are given as `Start` objects."""
    return start


def iterations_to_criterion(
    workload: Workload,
    trials: Sequence[Description],
    begin: Callable[[Description], Start],
    *,
    limit: int,
    jobs: int = 1,
    done: TrialDone = lambda trial, count: None,
) -> Floats:
    """Return the fractional number of iterations that each trial needs to converge; infinity if it exceeds `limit`.

    `trials` has a description of each trial. `begin` computes the start of the trial from it, in the process that runs
    the trial."""
    if jobs == 1 or len(trials) <= workload.lanes:
        return run_lanes(workload, trials, begin, limit, done)
    parts = [range(first, len(trials), jobs) for first in range(min(jobs, len(trials)))]
    work = partial(_run_part, workload, begin, limit)
    counts = map_in_processes(work, [[(i, trials[i]) for i in part] for part in parts], jobs=jobs, on_report=done)
    result = np.full(len(trials), np.inf)
    for part, part_counts in zip(parts, counts, strict=True):
        result[part] = part_counts
    return result


def _run_part(
    workload: Workload, begin: Callable[[Any], Start], limit: int, part: Sequence[tuple[int, Any]], report: Report
) -> Floats:
    numbers, trials = zip(*part, strict=True)
    return run_lanes(workload, trials, begin, limit, lambda trial, count: report(numbers[trial], count))
