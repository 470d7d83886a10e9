"""The interface of a workload for the simulator: an iteration that advances many trials at once.

The states of many trials form a stack: the same named arrays with one more axis, the last, for the trial. Operations
then run over contiguous memory of many trials.
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
    """The next iteration of each trial of a stack, and the number of its random stream (its seed).

    The draws of an iteration depend on these two alone, so a trial draws the same numbers with and without a failure.
    """

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
        """True if runs with different random streams differ, so that every trial needs its own run without failures."""

    @property
    def steady(self) -> bool:
        """True if the loss falls more and more slowly, so that its slope tells how long it need not be computed."""

    @property
    def lanes(self) -> int:
        """The number of trials in one stack, which is fixed, because rounding may depend on the shape of a matrix."""

    @property
    def blocks(self) -> Blocks:
        """The division of the state into blocks."""

    @property
    def norm(self) -> Norm:
        """The function that returns the distance of each block between two states."""

    def start(self, stream: int = 0) -> Arrays:
        """Return the initial state of a run with this random stream."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        """Do one iteration of every trial; the result of a trial must not depend on other trials in the stack."""

    def loss(self, stack: Stack) -> Floats:
        """Return the loss of every trial."""


def norm_order(workload: Workload) -> float:
    """Return the order of the norm that combines the distances of blocks: the workload's `order`, by default 2."""
    return float(getattr(workload, "order", 2))


def stacked(states: Sequence[Arrays]) -> Stack:
    """Combine the states of several trials into one stack, whose last axis is the trial."""
    return {name: np.stack([state[name] for state in states], axis=-1) for name in states[0]}


def unstacked(stack: Stack, lane: int) -> Arrays:
    """Return a copy of the state of trial number `lane` in the stack."""
    return {name: values[..., lane].copy() for name, values in stack.items()}
