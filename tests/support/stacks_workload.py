"""A correct workload that trains several states at once, of which tests replace one part."""

from typing import Any

import numpy as np

from holdfast.blocks import division
from holdfast.workloads.workload import Arrays, Clock, Stack


class Stacks:
    """A correct workload of several lanes, of which each test replaces one part."""

    name, stochastic, steady, lanes = "stacks", False, False, 4
    criterion: Any = 0.01
    blocks = division.along({"x": np.zeros(8)}, "x")
    norm = staticmethod(division.euclidean)

    def start(self, stream: int = 0) -> Arrays:
        return {"x": np.arange(1.0, 9.0)}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        return {"x": stack["x"] / 2}

    def loss(self, stack: Stack) -> Any:
        return np.abs(stack["x"]).max(axis=0)
