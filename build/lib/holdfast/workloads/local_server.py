"""Iterations of a divided workload in one process, round by round, as the parameter server does them.

Simulated nodes hold packed blocks, workers have parts of the input, and they exchange only messages that would pass
over a network. The number of workers changes the last bits of the result; the owners of blocks do not.
"""

from functools import reduce
from typing import cast

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.workloads.block_layout import Layouts, require_fit, summed
from holdfast.workloads.divided import DividedWorkload, Push, RoundId
from holdfast.workloads.workload import Arrays


class SimulatedServer:
    """A parameter server simulated in one process, which trains `workload`; `owners` has the node of each block."""

    def __init__(self, workload: DividedWorkload, workers: int = 1, owners: Ids | None = None) -> None:
        if workers < 1:
            raise BadInput(f"workers must be at least 1 (got {workers}).")
        self._workload, self._layouts = workload, Layouts(workload.blocks)
        owners = np.zeros(len(workload.blocks), np.int64) if owners is None else owners
        self._nodes: list[Ids] = [np.flatnonzero(owners == node) for node in np.unique(owners)]
        self._parts = [workload.part(worker, workers) for worker in range(workers)]

    def advance(self, state: Arrays, iteration: int, stream: int = 0) -> Arrays:
        """Return the state after one iteration; `stream` is the random seed."""
        state = {name: value.copy() for name, value in state.items()}
        for round in range(self._workload.rounds):
            when, summaries = RoundId(iteration, round, stream), self._summaries(state)
            pushes = [
                self._workload.compute(part, when, self._pack(state, self._workload.pulls(part, round)), summaries)
                for part in self._parts
            ]
            for ids in self._nodes:
                self._apply(state, when, ids, pushes)
        return state

    def loss(self, state: Arrays) -> float:
        workload, summaries = self._workload, self._summaries(state)
        pulled = [self._pack(state, workload.pulls(part, workload.rounds)) for part in self._parts]
        parts = zip(self._parts, pulled, strict=True)
        return workload.total([workload.measure(part, own, summaries) for part, own in parts])

    def _apply(self, state: Arrays, when: RoundId, node: Ids, pushes: list[Push]) -> None:
        for push in pushes:
            require_fit(self._layouts.of(push.ids), push.values)
        changed = node[np.isin(node, np.concatenate([push.ids for push in pushes]))]
        if len(changed):
            held = self._pack(state, changed)
            self._workload.apply(when, changed, held, summed(self._layouts, changed, pushes))
            self._workload.blocks.unpack(held, changed, state)

    def _summaries(self, state: Arrays) -> Arrays:
        summaries = [self._workload.summary(ids, self._pack(state, ids)) for ids in self._nodes]
        return reduce(lambda a, b: {name: a[name] + b[name] for name in a}, summaries)

    def _pack(self, state: Arrays, ids: Ids) -> Arrays:
        return cast(Arrays, self._workload.blocks.pack(state, ids))
