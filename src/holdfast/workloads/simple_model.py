"""A model for the lab that is written for one state at a time (`OneState`), and the adapter that makes it a workload.

docs/workloads.md lists the optional attributes of a model and their defaults.
"""

from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Norm, by_row, euclidean
from holdfast.errors import BadInput
from holdfast.workloads.criterion import LossAt, Wrapper
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, advance_each, loss_of_each

ASKED = ("start", "step", "loss", "criterion")


class OneState(Protocol):
    """The interface of a model for the lab. Its methods train one state, a dict of NumPy arrays, step by step."""

    @property
    def criterion(self) -> float | LossAt:
        """The loss below which the model counts as converged, or `LossAt(n)` for its own loss after n iterations."""

    def start(self, rng: np.random.Generator) -> Arrays:
        """Return the initial state. Draw random numbers from `rng` only."""

    def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
        """Return the state after one more iteration. The method may modify `state`, and draws from `rng` only."""

    def loss(self, state: Arrays) -> float:
        """Return the loss of `state`, a single number."""


class OneStateAdapter(Wrapper):
    """A `Workload` made from a model that trains one state at a time; a batch of runs is trained one by one."""

    def __init__(self, model: OneState) -> None:
        super().__init__(model)
        self.name = str(getattr(model, "name", type(model).__name__.lower()))
        self.lanes = int(getattr(model, "lanes", 1))
        self.steady = bool(getattr(model, "steady", False))
        self.norm: Norm = getattr(model, "norm", euclidean)

    @cached_property
    def stochastic(self) -> bool:
        declared = getattr(self._wrapped, "stochastic", None)
        if declared is not None:
            return bool(declared)
        first, second = _generator(0, -1), _generator(0, 0)
        untouched = first.bit_generator.state, second.bit_generator.state
        self._wrapped.step(_copied(_arrays(self._wrapped.start(first), "start")), second)
        return untouched != (first.bit_generator.state, second.bit_generator.state)

    @cached_property
    def blocks(self) -> Blocks:
        blocks = getattr(self._wrapped, "blocks", None)
        return by_row(self.start()) if blocks is None else blocks

    @cached_property
    def criterion(self) -> float:
        criterion = self._wrapped.criterion
        return criterion.evaluate(cast(Workload, self)) if isinstance(criterion, LossAt) else float(criterion)

    def start(self, stream: int = 0) -> Arrays:
        return _copied(_arrays(self._wrapped.start(_generator(stream, -1)), "start"))

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        return advance_each(self._step, stack, clock)

    def loss(self, stack: Stack) -> Floats:
        return loss_of_each(self._loss, stack)

    def _loss(self, state: Arrays) -> float:
        loss = self._wrapped.loss(state)
        if np.ndim(loss) != 0:
            raise BadInput(f"loss returns an array of shape {np.shape(loss)}: it must return one number.")
        return float(loss)

    def _step(self, state: Arrays, iteration: int, stream: int) -> Arrays:
        rng = _generator(stream, iteration)
        untouched, shapes = None if self.stochastic else rng.bit_generator.state, _shapes(state)
        after = _arrays(self._wrapped.step(state, rng), "step")
        if _shapes(after) != shapes:
            made = f"step of {self.name} makes {_shapes(after)} of {shapes}"
            raise BadInput(f"{made}: it must keep names, shapes and types.")
        if untouched is not None and rng.bit_generator.state != untouched:
            raise BadInput(
                f"step of {self.name} draws random numbers at iteration {iteration}, but not at first: "
                "set `stochastic = True` in the model."
            )
        return after


def _generator(stream: int, iteration: int) -> np.random.Generator:
    return np.random.default_rng((stream, iteration + 1))


def _arrays(result: Any, function: str) -> Arrays:
    if not isinstance(result, dict) or not result:
        raise BadInput(f"{function} returns a {type(result).__name__}: it must return a dict of arrays.")
    return {str(name): np.asarray(value) for name, value in result.items()}


def _copied(arrays: Arrays) -> Arrays:
    return {name: value.copy() for name, value in arrays.items()}


def _shapes(arrays: Arrays) -> str:
    return ", ".join(f"{name} {value.dtype}{list(value.shape)}" for name, value in sorted(arrays.items()))
