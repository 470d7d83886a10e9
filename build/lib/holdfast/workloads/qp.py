"""Gradient descent on a small quadratic program, whose contraction rate and optimum are known exactly."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Norm, along, euclidean
from holdfast.workloads.workload import Arrays, Clock, Stack


@dataclass(frozen=True, eq=False)
class QuadraticProgram:
    """Gradient descent on ½xᵀAx − bᵀx; the loss is the distance to the optimum. A has the eigenvalues `curvatures`."""

    seed: int = 0
    curvatures: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0)
    rate: float = 0.01
    criterion: float = 1e-4
    lanes: int = 250
    name: str = "qp"
    stochastic: bool = False
    steady: bool = False
    norm: Norm = field(default=euclidean, repr=False)

    @cached_property
    def _problem(self) -> tuple[Floats, Floats, Floats]:
        rng = np.random.default_rng(self.seed)
        size = len(self.curvatures)
        basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
        optimum, start = rng.normal(size=size), 4 * rng.normal(size=size)
        return basis @ np.diag(self.curvatures) @ basis.T, optimum, start

    @property
    def optimum(self) -> Floats:
        return self._problem[1]

    @cached_property
    def blocks(self) -> Blocks:
        return along(self.start(), "x")

    def start(self, stream: int = 0) -> Arrays:
        return {"x": self._problem[2].copy()}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        matrix, optimum, _ = self._problem
        error = stack["x"] - optimum[:, None]
        # Summed term by term: a library's product of so small a matrix may round by the width of the stack.
        return {"x": stack["x"] - self.rate * (matrix[:, :, None] * error).sum(axis=1)}

    def loss(self, stack: Stack) -> Floats:
        return np.asarray(np.linalg.norm(stack["x"] - self.optimum[:, None], axis=0))
