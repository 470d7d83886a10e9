"""What the simulator asks of a workload: an iteration that advances many trials at once.

The states of many trials are kept as a stack: the same named arrays with one more axis, the last, for the trial. Last,
because then every operation on a trial's numbers runs over neighbouring memory of many trials.
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
    """Where each trial of a stack stands: the iteration it is about to do, and its stream of random numbers.

    What an iteration draws is keyed by these two alone, so a trial draws the same numbers with and without a failure.
    """

    iteration: Ids
    stream: Ids


class Workload(Protocol):
    """An iterative algorithm with a loss that falls under a criterion; what it draws follows from a stream and an iteration."""

    @property
    def name(self) -> str:
        """Which workload on which data."""

    @property
    def criterion(self) -> float:
        """The run has converged at the first iteration whose loss is under this."""

    @property
    def stochastic(self) -> bool:
        """Whether runs of two streams differ, in their start or in what iterations draw: then every trial has its own."""

    @property
    def steady(self) -> bool:
        """Whether the loss falls, and ever more slowly, so that its slope says until when it need not be looked at."""

    @property
    def lanes(self) -> int:
        """How many trials one stack holds. Fixed, because the rounding of a matrix product may depend on its shape."""

    @property
    def blocks(self) -> Blocks:
        """How the state is divided into blocks."""

    @property
    def norm(self) -> Norm:
        """How far apart two states are, block by block."""

    def start(self, stream: int = 0) -> Arrays:
        """The state before the first iteration of a stream."""

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        """One iteration of every trial; a trial's result must not depend on its neighbours in the stack."""

    def loss(self, stack: Stack) -> Floats:
        """The loss of every trial."""


def norm_order(workload: Workload) -> float:
    """How distances of blocks make up that of the state, as `full_size` has it: what a workload says as `order`, else 2."""
    return float(getattr(workload, "order", 2))


def stacked(states: Sequence[Arrays]) -> Stack:
    """Many states as one stack."""
    return {name: np.stack([state[name] for state in states], axis=-1) for name in states[0]}


def unstacked(stack: Stack, lane: int) -> Arrays:
    """A copy of the state of one trial."""
    return {name: values[..., lane].copy() for name, values in stack.items()}
