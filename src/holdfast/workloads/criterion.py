"""The convergence criterion `LossAt`: the loss that a run without failures has after some iterations."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from holdfast.code_digest import object_digest
from holdfast.errors import BadInput
from holdfast.workloads.workload import Clock, Workload, stacked


@dataclass(frozen=True, slots=True)
class LossAt:
    """A convergence criterion: a model has converged when its loss is as low as after `iteration` iterations.

    This loss is measured in a run without failures, with the random seed 0."""

    iteration: int

    def __post_init__(self) -> None:
        if self.iteration < 2:
            raise BadInput(f"LossAt must be at least 2, to leave an iteration for a failure (got {self.iteration}).")

    def evaluate(self, workload: Workload) -> float:
        """Train `workload` for `self.iteration` iterations, and return the next floating-point number above its loss.

        A run converges when its loss is below the criterion, so this run converges exactly at iteration `self.iteration`."""
        stack = stacked([workload.start(0)] * workload.lanes)
        with threadpool_limits(1):  # the number of threads would show in the last bits
            for iteration in range(self.iteration):
                clock = Clock(np.full(workload.lanes, iteration), np.zeros(workload.lanes, np.int64))
                stack = workload.advance(stack, clock)
            loss = float(np.asarray(workload.loss(stack))[0])
        if not np.isfinite(loss):
            at = f"at iteration {self.iteration}"
            raise BadInput(f"the loss of {workload.name} {at} is {loss}, which cannot be a criterion.")
        return float(np.nextafter(loss, np.inf))  # so that the run is under it at this very iteration


class Wrapper:
    """A workload that takes every attribute it does not define from another workload or model."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    @property
    def code(self) -> str:
        return object_digest(self._wrapped)


class EvaluatedCriterion(Wrapper):
    """A workload whose criterion `LossAt` is replaced by the loss itself, computed when first used."""

    @cached_property
    def criterion(self) -> float:
        at: LossAt = self._wrapped.criterion
        return at.evaluate(self._wrapped)


def with_number(workload: Any) -> Any:
    """Return `workload`; if its criterion is a `LossAt`, return a wrapper of it that has a number as criterion."""
    return EvaluatedCriterion(workload) if isinstance(workload.criterion, LossAt) else workload
