"""The interface of a workload for the simulator: an iteration that advances many trials at once.

The states of many trials are a stack: the same named arrays with one more axis, the last, for the trial. Then every
operation on a trial's numbers runs over neighbouring memory of many trials.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Blocks, Floats, Ids, Norm

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Stack: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """The next iteration of each trial of a stack, and its stream of random numbers.

    The draws of an iteration depend on these two alone, so a trial draws the same numbers with and without a failure.
    """

    iteration: Ids
    stream: Ids


class Workload(Protocol):
    """An iterative algorithm with a loss that falls below a criterion; its draws depend on a stream and an iteration."""

    @property
    def name(self) -> str:
        """The model and its data."""

    @property
    def criterion(self) -> float:
        """A run has converged at the first iteration whose loss is below this."""

    @property
    def stochastic(self) -> bool:
        """True if runs of two streams differ, in their start or in later draws; then every trial has its own run."""

    @property
    def steady(self) -> bool:
        """True if the loss falls, ever more slowly, so that its slope tells how long it need not be computed."""

    @property
    def lanes(self) -> int:
        """The number of trials in one stack; it is fixed, because rounding may depend on the shape of a matrix."""

    @property
    def blocks(self) -> Blocks:
        """The division of the state into blocks."""

    @property
    def norm(self) -> Norm:
        """The distance of two states, block by block."""

    def start(self, stream: int = 0) -> Arrays:
        """Return the state before the first iteration of a stream."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        """Do one iteration of every trial; a trial's result must not depend on its neighbours in the stack."""

    def loss(self, stack: Stack) -> Floats:
        """Return the loss of every trial."""


def norm_order(workload: Workload) -> float:
    """Return how distances of blocks combine, as in `full_size`: the workload's `order`, by default 2."""
    return float(getattr(workload, "order", 2))


def stacked(states: Sequence[Arrays]) -> Stack:
    """Combine states into one stack."""
    return {name: np.stack([state[name] for state in states], axis=-1) for name in states[0]}


def unstacked(stack: Stack, lane: int) -> Arrays:
    """Copy the state of one trial."""
    return {name: values[..., lane].copy() for name, values in stack.items()}
