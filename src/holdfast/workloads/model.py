"""A base class for your own model. A subclass defines `criterion`, `start`, `part`, `compute`, `apply` and `measure`.

`DividedWorkload` describes these and all other methods, which may be overridden too.
"""

from functools import cached_property
from typing import Any, cast

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Ids, Norm, by_row, euclidean
from holdfast.workloads.divided import DividedDefaults, DividedWorkload
from holdfast.workloads.local_server import SimulatedServer
from holdfast.workloads.workload import Clock, Stack, advance_each, loss_of_each


class Model(DividedDefaults):
    """A base class for your own workload; subclasses define the criterion, the initial arrays, updates and the loss.

    By default, every row of every array is a block, workers pull all blocks, and each iteration has one update. `lanes`
    is the number of independent runs that are simulated together. Set `stochastic` if runs with different seeds differ,
    and `steady` if the loss only falls, more and more slowly, so that the lab need not compute it after every
    iteration."""

    rounds: int = 1
    lanes: int = 1
    stochastic: bool = False
    steady: bool = False

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @cached_property
    def blocks(self) -> Blocks:
        return by_row(cast(DividedWorkload, self).start())

    @property
    def norm(self) -> Norm:
        return euclidean

    def pulls(self, part: Any, round: int) -> Ids:
        return self._everything

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        return advance_each(self._alone.advance, stack, clock)

    def loss(self, stack: Stack) -> Floats:
        return loss_of_each(self._alone.loss, stack)

    @cached_property
    def _alone(self) -> SimulatedServer:
        return SimulatedServer(cast(DividedWorkload, self))

    @cached_property
    def _everything(self) -> Ids:
        return np.arange(len(self.blocks))
