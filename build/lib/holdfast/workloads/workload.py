"""The interface of a workload for the simulator: an iteration that advances many trials at once.

The states of many trials form a stack: the same named arrays with one more axis, the last, for the trial. Operations
then run over contiguous memory of many trials.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Blocks, Floats, Ids, Norm

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Stack: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """The next iteration and the random seed of each of several independent runs."""

    iteration: Ids
    stream: Ids


class Workload(Protocol):
    """An iterative algorithm that has converged when its loss falls below a criterion."""

    @property
    def name(self) -> str:
        """The name of the workload: its model and its data set."""

    @property
    def criterion(self) -> float:
        """The loss below which a run has converged."""

    @property
    def stochastic(self) -> bool:
        """True if runs with different seeds differ, so that each seed needs its own reference run without failures."""

    @property
    def steady(self) -> bool:
        """True if the loss falls more and more slowly, so that it need not be computed after every iteration."""

    @property
    def lanes(self) -> int:
        """The number of independent runs computed together; it is fixed, because rounding may depend on it."""

    @property
    def blocks(self) -> Blocks:
        """The division of the state into blocks."""

    @property
    def norm(self) -> Norm:
        """The function that returns, for each block, its distance between two states."""

    def start(self, stream: int = 0) -> Arrays:
        """Return the initial state of a run with the random seed `stream`."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        """Do one iteration of every independent run in `stack`; runs must not influence each other."""

    def loss(self, stack: Stack) -> Floats:
        """Return the loss of each independent run in `stack`."""


def norm_order(workload: Workload) -> float:
    """Return the order of the norm that combines block distances to one distance: `workload.order`, by default 2."""
    return float(getattr(workload, "order", 2))


def stacked(states: Sequence[Arrays]) -> Stack:
    """Combine the states of several independent runs; the last axis of each array is the run."""
    return {name: np.stack([state[name] for state in states], axis=-1) for name in states[0]}


def unstacked(stack: Stack, lane: int) -> Arrays:
    """Return a copy of the state of run number `lane` in `stack`."""
    return {name: values[..., lane].copy() for name, values in stack.items()}


def advance_each(step: Callable[[Arrays, int, int], Arrays], stack: Stack, clock: Clock) -> Stack:
    """Advance the runs in `stack` one by one; `step` takes a state, the next iteration and the random seed."""
    times = zip(clock.iteration.tolist(), clock.stream.tolist(), strict=True)
    return stacked([step(unstacked(stack, lane), *time) for lane, time in enumerate(times)])


def loss_of_each(loss: Callable[[Arrays], float], stack: Stack) -> Floats:
    """Return the loss of each run in `stack`, computed by calling `loss` with the state of one run after the other."""
    lanes = next(iter(stack.values())).shape[-1]
    return np.array([loss(unstacked(stack, lane)) for lane in range(lanes)])
