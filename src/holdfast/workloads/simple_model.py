"""A model for the lab that is written for one state at a time (`OneState`), and the adapter that makes it a workload.

docs/workloads.md lists the optional attributes of a model and their defaults.
"""

from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Norm, by_row, euclidean
from holdfast.code_digest import object_digest
from holdfast.errors import BadInput
from holdfast.workloads.criterion import LossAt
from holdfast.workloads.workload import Arrays, Clock, Stack, Workload, stacked, unstacked

ASKED = ("start", "step", "loss", "criterion")


class OneState(Protocol):
    """The interface of a model that trains a single run; `OneStateAdapter` makes it a `Workload`."""

    @property
    def criterion(self) -> float | LossAt:
        """The loss below which the model has converged, or `LossAt(n)` for the loss after n iterations."""

    def start(self, rng: np.random.Generator) -> Arrays:
        """Return the initial arrays, drawing random numbers from `rng` only."""

    def step(self, state: Arrays, rng: np.random.Generator) -> Arrays:
        """Return the arrays after one more iteration; `state` may be modified."""

    def loss(self, state: Arrays) -> float: ...


class OneStateAdapter:
    """A `Workload` made from a model that trains one state at a time; a batch of runs is trained one by one."""

    def __init__(self, model: OneState) -> None:
        self._model = model
        self.name = str(getattr(model, "name", type(model).__name__.lower()))
        self.lanes = int(getattr(model, "lanes", 1))
        self.steady = bool(getattr(model, "steady", False))
        self.norm: Norm = getattr(model, "norm", euclidean)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    @property
    def code(self) -> str:
        return object_digest(self._model)

    @cached_property
    def stochastic(self) -> bool:
        declared = getattr(self._model, "stochastic", None)
        if declared is not None:
            return bool(declared)
        first, second = _generator(0, -1), _generator(0, 0)
        untouched = first.bit_generator.state, second.bit_generator.state
        self._model.step(_copied(_arrays(self._model.start(first), "start")), second)
        return untouched != (first.bit_generator.state, second.bit_generator.state)

    @cached_property
    def blocks(self) -> Blocks:
        blocks = getattr(self._model, "blocks", None)
        return by_row(self.start()) if blocks is None else blocks

    @cached_property
    def criterion(self) -> float:
        criterion = self._model.criterion
        return criterion.evaluate(cast(Workload, self)) if isinstance(criterion, LossAt) else float(criterion)

    def start(self, stream: int = 0) -> Arrays:
        return _copied(_arrays(self._model.start(_generator(stream, -1)), "start"))

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        when = zip(clock.iteration.tolist(), clock.stream.tolist(), strict=True)
        return stacked([self._step(unstacked(stack, lane), *trial) for lane, trial in enumerate(when)])

    def loss(self, stack: Stack) -> Floats:
        lanes = next(iter(stack.values())).shape[-1]
        losses = [self._model.loss(unstacked(stack, lane)) for lane in range(lanes)]
        if wrong := [loss for loss in losses if np.ndim(loss) != 0]:
            raise BadInput(f"loss returns an array of shape {np.shape(wrong[0])}: it must return one number.")
        return np.array([float(loss) for loss in losses])

    def _step(self, state: Arrays, iteration: int, stream: int) -> Arrays:
        rng = _generator(stream, iteration)
        untouched, shapes = None if self.stochastic else rng.bit_generator.state, _shapes(state)
        after = _arrays(self._model.step(state, rng), "step")
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
