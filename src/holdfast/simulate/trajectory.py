"""The unperturbed run, computed once: every iterate and its loss, from the start to the criterion."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.blocks import Floats
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays, Workload, stacked, unstacked


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """States and losses of iterations 0..length; iteration `length` is the first under the criterion."""

    states: list[Arrays]
    losses: Floats

    @property
    def length(self) -> int:
        """Iterations to the criterion without any failure: what iteration costs are counted from."""
        return len(self.states) - 1


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
            stack = workload.advance(stack)
            states.append(unstacked(stack, 0))
            losses.append(float(workload.loss(stack)[0]))
            progress(1)
    return Trajectory(states, np.array(losses))


def proceed(
    workload: Workload, state: Arrays, iterations: int, *, progress: Callable[[int], None] = lambda done: None
) -> Arrays:
    """The state that many iterations later."""
    stack = stacked([state])
    with threadpool_limits(1):
        for _ in range(iterations):
            stack = workload.advance(stack)
            progress(1)
    return unstacked(stack, 0)
