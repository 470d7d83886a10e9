"""The network between simulated supervisors: addresses, and stores that processes keep there.

Supervisors meet by the product's own code (`MultiNodeRendezvous`). Replaced are only torch's `TCPStore`, sockets, and
the queue and the future between a supervisor and the thread of its connection. A question to a process that has exited
fails at once. A question to a machine that is lost, cut off or paused gets no answer.
"""

import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

from holdfast.supervise.nodes import close_round, connection, find_host, multi_node, peers, rendezvous
from holdfast.supervise.nodes.connection import Connection
from holdfast.supervise.nodes.rendezvous import LOOPBACK, Node
from simulation.faults import Faults
from simulation.messages import PATIENCE, Messages
from simulation.product import Clock, Names
from simulation.scheduler import Process, Wait, World

PORT = 29400
LOOK = 0.1
T = TypeVar("T")


def address_of(node: int) -> str:
    return f"10.0.0.{node + 1}"


class SimulatedNode(Node):
    """The settings of a node whose address is not looked up in the operating system."""

    __slots__ = ()

    @property
    def address(self) -> str:
        return address_of(self.rank) if self.of > 1 else LOOPBACK


class Kept(Messages):
    """A store that the process `keeper` keeps, at a port of its node."""

    def __init__(self, network: "Network", keeper: Process, port: int) -> None:
        super().__init__(network.world, network.faults, keeper.node, network.reaches)
        self._network, self._process, self.port = network, keeper, port

    def add(self, key: str, amount: int) -> int:
        if amount and not key.startswith("beat/"):
            return super().add(key, amount)

        def count() -> int:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

        return self._request("look for", key, count)  # too frequent for the trace, and no change to act on

    def _request(self, verb: str, key: str, effect: Callable[[], T]) -> T:
        world, process = self._world, self._world.process
        if verb != "look for":
            world.sleep(world.latency() / 10)
        deadline = world.now + (PATIENCE if "supervisor" not in process.name else 2 * PATIENCE)
        self._cross(process.node, self._process.node, deadline, f"{verb} {key}")
        phase = f"{verb} {key.partition('/')[0]}"
        if verb != "look for":
            self._faults.point(phase)
            world.record(f"{verb} {key}")
        result = effect()
        if verb != "look for":
            self._faults.after(phase)
        self._cross(self._process.node, process.node, deadline, f"{verb} {key}")
        return result

    def _cross(self, source: int, target: int, deadline: float, what: str) -> None:
        """Wait until a message from node `source` arrives at node `target`."""
        while not self._network.delivers(self._process, source, target):
            if self._world.now > deadline:
                raise RuntimeError(f"no answer to {what}")
            self._world.sleep(LOOK * self._world.rng.uniform(1, 1.2))


class Network:
    """The addresses of a simulated cluster. `reaches(node, other)` says which way the network works.

    `silent` are the nodes whose machines do not even refuse connections, because they were lost."""

    def __init__(self, world: World, faults: Faults, reaches: Callable[[int, int], bool]) -> None:
        self.world, self.faults, self.reaches = world, faults, reaches
        self.silent: set[int] = set()
        self._kept: dict[tuple[str, int], Kept] = {}
        self._ports = 40000

    def listen(self, address: str, port: int = 0) -> Kept:
        process = self.world.process
        if address not in (LOOPBACK, address_of(process.node)):
            raise OSError(99, "the address belongs to another machine")
        if not port:
            self._ports += 1
            port = self._ports
        kept = self._kept[address, port] = Kept(self, process, port)
        return kept

    def store(self, address: str, port: int) -> Kept:
        return self._kept[address, port]

    def delivers(self, keeper: Process, source: int, target: int) -> bool:
        """Return True if a message between a client and `keeper` arrives now; raise RuntimeError if it is refused."""
        if keeper.node in self.silent or not self.reaches(source, target):
            return False
        if keeper.is_dead:
            raise RuntimeError("connection reset by peer")
        return keeper.paused_until <= self.world.now

    def connect(self, address: str, port: int, *, is_master: bool, timeout: timedelta) -> Kept:
        """Connect to a store, as torch's `TCPStore` does."""
        kept = self._found(address, port)
        kept._cross(self.world.process.node, kept._process.node, self.world.now + timeout.total_seconds(), "connect")
        return kept

    def _found(self, address: str, port: int) -> Kept:
        if (address, port) not in self._kept:
            raise RuntimeError("connection refused")
        return self._kept[address, port]

    def create_connection(self, where: tuple[str, int], timeout: float) -> Any:
        """Connect to a port, as the function of the module `socket` does: the kernel of a paused process accepts."""
        self.world.sleep(self.world.latency() / 10)
        kept, node = self._kept.get(where), int(where[0].rpartition(".")[2]) - 1
        own = self.world.process.node
        if node in self.silent or not (self.reaches(own, node) and self.reaches(node, own)):
            self.world.sleep(timeout)
            raise TimeoutError
        if kept is None or kept._process.is_dead:
            raise ConnectionRefusedError
        return nullcontext()


class Queue:
    """The functions of `queue.SimpleQueue`, between tasks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._wait: Wait | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._wait:
            self._wait.end()

    def get(self, timeout: float | None = None) -> Any:
        while not self._items:
            self._wait = self._world.wait(PATIENCE if timeout is None else timeout)
            self._wait.run()
            self._wait = None
            if timeout is not None and not self._items:
                raise queue.Empty
        return self._items.popleft()


class Answer:
    """The functions of `Future`, between tasks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._values: list[Callable[[], Any]] = []
        self._wait: Wait | None = None

    def set_result(self, value: Any) -> None:
        self._set(lambda: value)

    def set_exception(self, error: Exception) -> None:
        def fail() -> None:
            raise error

        self._set(fail)

    def _set(self, value: Callable[[], Any]) -> None:
        self._values.append(value)
        if self._wait:
            self._wait.end()

    def result(self, limit: float) -> Any:
        if not self._values:
            self._wait = self._world.wait(limit)
            self._wait.run()
        if not self._values:
            raise TimeoutError
        return self._values[0]()


class SimulatedConnection:
    """The product's `Connection` as a task of the process that starts it."""

    network: Network
    ask, end, run, _refuse = Connection.ask, Connection.end, Connection.run, Connection._refuse

    def __init__(self, where: str, who: str, patience: float) -> None:
        world = self.network.world
        self.where, self.who, self._patience, self.is_silent = where, who, patience, False
        self._work = Queue(world)
        world.spawn(world.process, self.run)


def replacements(network: Network) -> Sequence[tuple[Any, str, Any]]:
    """Return what the product's modules get in place of sockets, threads and the clock."""
    world = network.world
    clock, names = Clock(world), Names(world)
    SimulatedConnection.network = network
    sockets = SimpleNamespace(create_connection=network.create_connection)
    return [
        *((module, "time", clock) for module in (connection, find_host, multi_node, peers)),
        *((module, "secrets", names) for module in (multi_node, rendezvous)),
        *((module, "listen", network.listen) for module in (close_round, multi_node, rendezvous)),
        *((module, "allow_connections", lambda workers: None) for module in (close_round, rendezvous)),
        (find_host, "Connection", SimulatedConnection),
        (multi_node, "stop_signals", SimpleNamespace(interrupting=nullcontext)),
        (multi_node, "end_all", lambda who, within: True),
        (connection, "TCPStore", network.connect),
        (connection, "Future", lambda: Answer(world)),
        (connection, "socket", sockets),
    ]
