"""Runs without failures: every state of a workload and its loss, from the start to the convergence criterion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays, Clock, Workload, stacked, unstacked


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The states and losses of a run, from iteration 0 to the first whose loss is below the convergence criterion."""

    states: list[Arrays]
    losses: Floats

    @property
    def length(self) -> int:
        """The number of iterations until the loss was below the convergence criterion."""
        return len(self.states) - 1

    def crossed(self, criterion: float) -> float:
        """Return the fractional number of iterations after which the interpolated loss meets `criterion`."""
        before, after = map(float, self.losses[-2:])
        return self.length - 1 + crossing(before, after, criterion)


def crossing(before: float, after: float, criterion: float) -> float:
    """Return the fraction of an iteration after which a loss falling from `before` to `after` meets `criterion`."""
    if not np.isfinite(before):
        return 1.0
    return max((before - criterion) / (before - after), 1e-9)  # above 0: the iteration before did not reach it


def trajectory(
    workload: Workload, *, limit: int = 10_000, progress: Callable[[int], None] = lambda done: None
) -> Trajectory:
    """Train a workload without failures until it converges, in at most `limit` iterations, with random seed 0."""
    return _runs(workload, [0], 1, limit, progress)[0]


def trajectories(workload: Workload, streams: Sequence[int], *, limit: int = 10_000) -> list[Trajectory]:
    """Train a workload once for each seed in `streams`, in one batch, until all converge within `limit` iterations."""
    padding = [streams[0]] * (workload.lanes - len(streams))
    return _runs(workload, [*streams, *padding], len(streams), limit, lambda done: None)


def _runs(
    workload: Workload, streams: Sequence[int], wanted: int, limit: int, progress: Callable[[int], None]
) -> list[Trajectory]:
    """Train with all random seeds at once, and return the first `wanted` runs, each up to its convergence."""
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
