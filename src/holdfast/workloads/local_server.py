"""Iterations of a divided workload in one process, round by round, as the parameter server does them.

Simulated nodes hold packed blocks, workers have parts of the input, and they exchange only messages that would pass
over a network. The number of workers changes the last bits of the result; the owners of blocks do not.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.workloads.block_layout import BlockSlices, together
from holdfast.workloads.divided import DividedWorkload, Push, RoundId
from holdfast.workloads.workload import Arrays


class _Route(NamedTuple):
    """The blocks that a worker pulls from one node: positions on the node (`there`) and in the result (`here`)."""

    node: int
    there: BlockSlices
    here: BlockSlices


class _Delivery(NamedTuple):
    """The update of the blocks `ids` on one node, summed from the pushes of several workers.

    `held` are the positions of these blocks in the arrays of the node. `pieces` has an entry for each worker: its
    number, the positions of the blocks in its push, and their positions in `ids`."""

    node: int
    ids: Ids
    held: BlockSlices
    # a worker, positions in its push, positions in `ids`
    pieces: tuple[tuple[int, BlockSlices, BlockSlices], ...]


class SimulatedServer:
    """A workload on a parameter server that is simulated in one process; `owners` has the node of each block."""

    def __init__(self, workload: DividedWorkload, workers: int = 1, owners: Ids | None = None) -> None:
        if workers < 1:
            raise BadInput(f"workers must be at least 1 (got {workers}).")
        self._workload, self._blocks = workload, workload.blocks
        owners = np.zeros(len(self._blocks), np.int64) if owners is None else owners
        self._nodes: list[Ids] = [np.flatnonzero(owners == node) for node in np.unique(owners)]
        everything = np.arange(len(self._blocks))
        self._everywhere = [BlockSlices(self._blocks, everything, ids) for ids in self._nodes]
        self._parts = [workload.part(worker, workers) for worker in range(workers)]
        self._routes: dict[tuple[int, int], list[_Route]] = {}
        self._deliveries: dict[int, tuple[list[Ids], list[_Delivery]]] = {}

    def advance(self, state: Arrays, iteration: int, stream: int = 0) -> Arrays:
        """Return the state after one iteration; `stream` is the random seed."""
        held = self._dealt(state)
        for round in range(self._workload.rounds):
            when, summed = RoundId(iteration, round, stream), self._summed(held)
            pushes = [
                self._workload.compute(part, when, self._pulled(held, worker, round), summed)
                for worker, part in enumerate(self._parts)
            ]
            self._apply(held, when, pushes)
        return together(list(zip(self._everywhere, held, strict=True)))

    def loss(self, state: Arrays) -> float:
        """Return the loss of `state`, combined from the losses that all workers measure."""
        held, last = self._dealt(state), self._workload.rounds
        summed = self._summed(held)
        pulled = [self._pulled(held, worker, last) for worker in range(len(self._parts))]
        parts = zip(self._parts, pulled, strict=True)
        return self._workload.total([self._workload.measure(part, own, summed) for part, own in parts])

    def _dealt(self, state: Arrays) -> list[Arrays]:
        taken = [places.take(state) for places in self._everywhere]
        return [{name: value.copy() for name, value in arrays.items()} for arrays in taken]

    def _summed(self, held: list[Arrays]) -> Arrays:
        summaries = [self._workload.summary(ids, arrays) for ids, arrays in zip(self._nodes, held, strict=True)]
        return reduce(lambda a, b: {name: a[name] + b[name] for name in a}, summaries)

    def _pulled(self, held: list[Arrays], worker: int, round: int) -> Arrays:
        if (worker, round) not in self._routes:
            self._routes[worker, round] = self._routed(self._workload.pulls(self._parts[worker], round))
        routes = self._routes[worker, round]
        return together([(route.here, route.there.take(held[route.node])) for route in routes])

    def _routed(self, wanted: Ids) -> list[_Route]:
        routes = []
        for node, ids in enumerate(self._nodes):
            if len(common := np.intersect1d(wanted, ids, assume_unique=True)):
                there, here = BlockSlices(self._blocks, ids, common), BlockSlices(self._blocks, wanted, common)
                routes.append(_Route(node, there, here))
        return routes

    def _apply(self, held: list[Arrays], when: RoundId, pushes: list[Push]) -> None:
        for node, ids, places, pieces in self._delivered(when.round, [push.ids for push in pushes]):
            pushed = together([(to, out.take(pushes[worker].values)) for worker, out, to in pieces], summed=True)
            changed = places.take(held[node])
            self._workload.apply(when, ids, changed, pushed)
            if not places.everything:
                places.put(changed, held[node])

    def _delivered(self, round: int, pushed: list[Ids]) -> list[_Delivery]:
        known, deliveries = self._deliveries.get(round, ([], []))
        if len(known) != len(pushed) or not all(map(np.array_equal, known, pushed)):
            deliveries = [found for node in range(len(self._nodes)) if (found := self._delivery(node, pushed))]
            self._deliveries[round] = pushed, deliveries
        return deliveries

    def _delivery(self, node: int, pushed: list[Ids]) -> _Delivery | None:
        own = [np.intersect1d(ids, self._nodes[node], assume_unique=True) for ids in pushed]
        changed = np.unique(np.concatenate(own))
        if not len(changed):
            return None
        pieces = [
            (worker, BlockSlices(self._blocks, ids, common), BlockSlices(self._blocks, changed, common))
            for worker, (ids, common) in enumerate(zip(pushed, own, strict=True))
            if len(common)
        ]
        return _Delivery(node, changed, BlockSlices(self._blocks, self._nodes[node], changed), tuple(pieces))
