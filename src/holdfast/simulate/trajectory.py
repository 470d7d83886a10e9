"""The unperturbed run, computed once: every iterate and its loss, from the start to the criterion."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks import Floats
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays, Clock, Workload, stacked, unstacked


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """States and losses of iterations 0..length; iteration `length` is the first under the criterion."""

    states: list[Arrays]
    losses: Floats

    @property
    def length(self) -> int:
        """Iterations to the criterion without any failure."""
        return len(self.states) - 1

    def crossed(self, criterion: float) -> float:
        """The same in fractions of an iteration: what iteration costs are counted from."""
        before, after = map(float, self.losses[-2:])
        return self.length - 1 + crossing(before, after, criterion)


def crossing(before: float, after: float, criterion: float) -> float:
    """Where in an iteration the loss meets the criterion, on a straight line from before to after: in (0, 1]."""
    if not np.isfinite(before):
        return 1.0
    return max((before - criterion) / (before - after), 1e-9)  # above 0: the iteration before was not there yet


def trajectory(
    workload: Workload, *, limit: int = 10_000, progress: Callable[[int], None] = lambda done: None
) -> Trajectory:
    """Run a workload without failures until its criterion."""
    stack = stacked([workload.start()])
    states, losses = [unstacked(stack, 0)], [float(workload.loss(stack)[0])]
    with threadpool_limits(1):  # the number of threads would show in the last bits
        while not losses[-1] < workload.criterion:
            if len(states) > limit:
                raise BadInput(
                    f"{workload.name} is not under its criterion {workload.criterion:g} after {limit} iterations "
                    f"(loss {losses[-1]:g}): raise the criterion or the limit"
                )
            stack = workload.advance(stack, _clock(len(states) - 1))
            states.append(unstacked(stack, 0))
            losses.append(float(workload.loss(stack)[0]))
            progress(1)
    return Trajectory(states, np.array(losses))


def proceed(
    workload: Workload, state: Arrays, first: int, last: int, *, progress: Callable[[int], None] = lambda done: None
) -> Arrays:
    """The state before iteration `last`, from that before iteration `first`."""
    stack = stacked([state])
    with threadpool_limits(1):
        for iteration in range(first, last):
            stack = workload.advance(stack, _clock(iteration))
            progress(1)
    return unstacked(stack, 0)


def _clock(iteration: int) -> Clock:
    return Clock(np.array([iteration]), np.array([0]))
