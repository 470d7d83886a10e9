"""A worker of the parameter server: an actor that pulls blocks, computes from parts of the input, and pushes.

Worker i computes part i of the input, and parts that it took over from lost workers. Every round can be repeated.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.actor import ActorHandle

from holdfast import events
from holdfast.blocks.division import Ids
from holdfast.blocks.partition_map import PartitionMap
from holdfast.history.log import HistoryWriter
from holdfast.sampler.digest import Samples
from holdfast.server.failure_detector import raylet_lives
from holdfast.server.members import call, gather
from holdfast.server.settings import Settings
from holdfast.server.shard import BlocksMoved
from holdfast.workloads.block_layout import BlockLayout, Places, merged, take
from holdfast.workloads.divided import Push, RoundId
from holdfast.workloads.workload import Arrays

PATIENCE = 20.0  # seconds for one call of a node


class WorkerRound(NamedTuple):
    """A worker's result for a round: the seconds of each phase, and the measured loss of each part of the data.

    `broken` is None if the round succeeded. Otherwise it has the lost nodes, and is empty if blocks have moved."""

    pull: float = 0.0
    compute: float = 0.0
    push: float = 0.0
    measures: Mapping[int, float] = {}
    broken: Mapping[int, str] | None = None


THREADS = {"health": 1}
"""The number of threads in each of a worker's Ray concurrency groups."""


class _BrokenOff(Exception):
    """An exception that abandons a round: `nodes` are lost or, if `nodes` is empty, blocks have moved."""

    def __init__(self, nodes: Mapping[int, str]) -> None:
        super().__init__(nodes)
        self.nodes = nodes


class _Routes(NamedTuple):
    """The nodes that hold the blocks of `layout`: the number of each node, its blocks, and their rows in the arrays."""

    layout: BlockLayout
    nodes: list[tuple[int, Ids, Places]]


class Worker:
    """A Ray actor that computes updates of the model from its part of the training data."""

    def __init__(self, number: int, settings: Settings) -> None:
        self._settings = settings
        self._workload = settings.load()
        self._history = HistoryWriter(settings.history, f"worker-{number}")
        self._parts: dict[int, Any] = {}
        self._map: PartitionMap | None = None
        self._nodes: Mapping[int, ActorHandle[Any]] = {}
        self._newest = -1
        self._gone: dict[int, str] = {}  # nodes of the map that are lost, and why
        self._has_summaries = True  # False once nodes have returned no summaries
        self._routes: dict[tuple[str, int, int], _Routes] = {}

    def ready(self) -> int:
        self._history.flush()
        return os.getpid()

    def route(self, partition: PartitionMap, nodes: "Mapping[int, ActorHandle[Any]]") -> None:
        self._map, self._nodes, self._newest = partition, nodes, max(self._newest, partition.version)
        self._gone = {node: why for node, why in self._gone.items() if node in partition.nodes}
        self._routes.clear()

    def compute(self, when: RoundId, parts: Sequence[int]) -> WorkerRound:
        """Pull blocks, compute an update and push it in round `when`, for each of the `parts` of the training data."""
        return self._do_rounds([(when, part) for part in parts], "push")

    def advance(self, iteration: int, part: int) -> WorkerRound:
        """Do all rounds of an iteration on one part of the data without waiting for other workers; measure the loss."""
        rounds = [RoundId(iteration, round, self._settings.seed) for round in range(self._workload.rounds)]
        turn = self._do_rounds([(when, part) for when in rounds], "apply")
        if turn.broken is not None:
            return turn
        return self.measure((part,))._replace(pull=turn.pull, compute=turn.compute, push=turn.push)

    def measure(self, parts: Sequence[int]) -> WorkerRound:
        began, measures = time.perf_counter(), {}
        try:
            for part in parts:
                pulled, summed = self._pull(part, self._workload.rounds)
                measures[part] = self._workload.measure(self._part(part), pulled, summed)
        except _BrokenOff as broken:
            return WorkerRound(broken=broken.nodes)
        return WorkerRound(compute=time.perf_counter() - began, measures=measures)

    def close(self) -> None:
        self._history.close()

    @ray.method(concurrency_group="health")
    def beat(self, newest: int) -> bool:
        self._newest = max(self._newest, newest)
        return raylet_lives()

    @ray.method(concurrency_group="health")
    def give_up(self, node: int, why: str) -> None:
        self._gone[node] = why

    @ray.method(concurrency_group="health")
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _do_rounds(self, rounds: Sequence[tuple[RoundId, int]], method: str) -> WorkerRound:
        """Pull blocks, compute an update and push it, for each round and part of the training data in `rounds`.

        `method` is the name of the node's method that receives the update."""
        pull = compute = push = 0.0
        try:
            for when, part in rounds:
                began = time.perf_counter()
                pulled, summed = self._pull(part, when.round)
                pulled_at = time.perf_counter()
                pushed = self._workload.compute(self._part(part), when, pulled, summed)
                computed_at = time.perf_counter()
                self._push(when, part, pushed, method)
                pull, compute = pull + pulled_at - began, compute + computed_at - pulled_at
                push += time.perf_counter() - computed_at
        except _BrokenOff as broken:
            return WorkerRound(pull, compute, push, broken=broken.nodes)
        return WorkerRound(pull, compute, push)

    def _part(self, part: int) -> Any:
        if part not in self._parts:
            self._parts[part] = self._workload.part(part, self._settings.workers)
        return self._parts[part]

    def _pull(self, part: int, round: int) -> tuple[Arrays, Arrays]:
        routes = self._routed("pull", part, round, self._workload.pulls(self._part(part), round))
        asked = {node: ids for node, ids, _ in routes.nodes}
        if self._has_summaries:
            asked = {node: asked.get(node, np.zeros(0, np.int64)) for node in self._map_now().nodes}
        version = self._map_now().version
        answers = self._gathered({node: call(self._nodes[node], "pull", version, ids) for node, ids in asked.items()})
        self._has_summaries = any(summary for _, summary in answers.values())
        summed: Arrays = {}
        for node in sorted(answers):
            summary = answers[node][1]
            summed = {name: summed[name] + value if name in summed else value for name, value in summary.items()}
        return merged(routes.layout, [(places, answers[node][0]) for node, _, places in routes.nodes]), summed

    def _push(self, when: RoundId, part: int, push: Push, method: str) -> None:
        routes, version = self._routed("push", part, when.round, push.ids), self._map_now().version
        calls = {}
        for node, ids, places in routes.nodes:
            own = push if len(routes.nodes) == 1 else Push(ids, take(push.values, places))
            calls[node] = call(self._nodes[node], method, version, when, part, own)
        self._gathered(calls)
        blocks, to = Samples.of(push.ids), list(calls)
        self._history.append(events.Pushed(when.iteration, when.round, part, version, blocks, to))
        self._history.flush()

    def _gathered(self, calls: dict[int, Any]) -> dict[int, Any]:
        version = self._map_now().version
        changed = dict.fromkeys(calls, "the map has changed")
        answers = gather(calls, lambda: changed if self._newest > version else dict(self._gone), PATIENCE)
        moved = any(isinstance(answer, BlocksMoved) for answer in answers.results.values())
        if self._newest > version or moved or answers.missing:
            raise _BrokenOff({} if self._newest > version or moved else answers.missing)
        return answers.results

    def _routed(self, what: str, part: int, round: int, ids: Ids) -> _Routes:
        routes = self._routes.get((what, part, round))
        if routes is None or not np.array_equal(routes.layout.ids, ids):
            layout, shares = BlockLayout(self._workload.blocks, ids), self._map_now().split(ids).items()
            routes = _Routes(layout, [(node, own, layout.places(layout.positions(own))) for node, own in shares])
            self._routes[what, part, round] = routes
        return routes

    def _map_now(self) -> PartitionMap:
        assert self._map is not None
        return self._map
