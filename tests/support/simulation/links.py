"""Simulated connections among the workers of a membership: collectives of tensors that end, or fail, like gloo's.

A collective is complete once all ranks take part, but not at the same moment on each rank. If a rank hangs up or dies
in between, some ranks have the result, and others get an error.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.distributed.gloo_link import GroupBroken, Link
from simulation.scheduler import Process, World


@dataclass(slots=True, eq=False)
class Connections:
    """The connections of one membership, between `size` ranks."""

    size: int
    processes: dict[int, Process] = field(default_factory=dict)
    is_cut: bool = False  # a rank has hung up
    calls: defaultdict[int, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    times: dict[int, list[float]] = field(default_factory=dict)  # of each complete call: when each rank has its result
    sent: defaultdict[tuple[int, int], deque[torch.Tensor]] = field(default_factory=lambda: defaultdict(deque))

    @property
    def is_broken(self) -> bool:
        return self.is_cut or any(process.is_dead for process in self.processes.values())


class Call:
    """A `Work` of torch: one rank's part in a collective, or in a transfer to or from another rank."""

    def __init__(self, world: World, result: Callable[[], bool], is_broken: Callable[[], bool]) -> None:
        self._world, self._result, self._is_broken = world, result, is_broken
        self._state = ""

    def done(self) -> bool:
        if not self._state:
            self._state = "done" if self._result() else "failed" if self._is_broken() else ""
        return bool(self._state)

    is_completed = done

    def value(self) -> None:
        if self._state == "failed":
            raise RuntimeError("connection closed by peer")

    def get_future(self) -> "Call":
        return self

    def wait(self) -> None:
        while not self.done():
            self._world.poll(0.002)
        self.value()


class SimulatedLink(Link):
    """The product's `Link`, with simulated connections; `known` are those of each membership."""

    def __init__(self, world: World, known: dict[str, Connections]) -> None:
        super().__init__()
        self._world, self._known = world, known
        self._connections: Connections | None = None
        self._rank = self._count = 0

    def post(self, operation: str, *arguments: Any) -> Any:
        connections = self._connections
        if self.is_broken or connections is None:
            return Call(self._world, lambda: False, lambda: True)
        (values,), *rest = arguments
        if operation in ("send", "recv"):
            return self._transfer(connections, operation, values, rest[0])
        root = rest[0].rootRank if operation == "broadcast" else None
        return self._collective(connections, values, root)

    def hang_up(self) -> None:
        self.is_broken = True
        if self._connections:
            self._connections.is_cut = True
            self._world.changes += 1

    def connect(self, store: Callable[[], Any], rank: int, size: int, outdated: Callable[[], bool]) -> None:
        connections = self._known.setdefault(store()._prefix, Connections(size))
        connections.processes[rank] = self._world.process
        self._world.changes += 1
        while len(connections.processes) < size:
            if outdated() or connections.is_broken:
                raise GroupBroken("the membership has changed while its group was built")
            self._world.poll(0.002)
        self._connections, self._rank, self._count, self.is_broken = connections, rank, 0, False
        self.do("allreduce", [torch.zeros(1)])

    def _collective(self, connections: Connections, values: torch.Tensor, root: int | None) -> Call:
        number, self._count, rank = self._count, self._count + 1, self._rank
        connections.calls[number][rank] = values.clone()
        self._world.changes += 1
        if len(connections.calls[number]) == connections.size:
            now, rng = self._world.now, self._world.rng
            connections.times[number] = [now + rng.choice((0.0, 0.01)) * rng.random() for _ in range(connections.size)]

        def result() -> bool:
            if number not in connections.times or self._world.now < connections.times[number][rank]:
                return False
            parts = connections.calls[number]
            values.copy_(sum(parts[i] for i in range(connections.size)) if root is None else parts[root])
            return True

        return Call(self._world, result, lambda: connections.is_broken)

    def _transfer(self, connections: Connections, operation: str, values: torch.Tensor, peer: int) -> Call:
        if operation == "send":
            connections.sent[self._rank, peer].append(values.clone())
            self._world.changes += 1
            return Call(self._world, lambda: True, lambda: False)
        queue = connections.sent[peer, self._rank]

        def result() -> bool:
            if not queue:
                return False
            values.copy_(queue.popleft())
            return True

        return Call(self._world, result, lambda: connections.is_broken)
