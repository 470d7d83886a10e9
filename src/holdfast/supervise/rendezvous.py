"""How the nodes of a run meet before each start: who takes part, and where the workers find their store.

One node alone needs nobody; several meet through torch's `c10d` rendezvous, as under torchrun. On top of either, the
nodes tell each other what they know, and so agree on the attempt, on a name for this round that no other has, and on
a new store for its workers: nothing that a dead attempt left in its store can be read by the next.

Whoever reaches the port of the rendezvous is trusted with the run: torch unpickles what it finds there, so that a
stranger could run code on every node. We listen on the address that was given and on no other; keep all machines but
the nodes of the run away from it, and from the ports of its workers.
"""

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from holdfast.ddp.membership import LIVE, Membership, publish
from holdfast.errors import BadInput, HoldfastError
from holdfast.supervise.checkpoints import Checkpoints

LOOPBACK = "127.0.0.1"
_RUN_ID = "holdfast"
_PATIENCE = timedelta(seconds=60)  # for a node to answer, and for the one that keeps the store to come up
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the machines of a run, by its number; several meet at an endpoint `host:port`."""

    rank: int = 0
    of: int = 1
    endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.of < 1 or not 0 <= self.rank < self.of:
            raise BadInput(f"there is no node {self.rank} of {self.of}: --node-rank counts from 0 to --nnodes less 1.")
        if self.of > 1 and self.endpoint is None:
            raise BadInput(f"{self.of} nodes have nowhere to meet: name one of them with --rendezvous host:port.")
        if self.endpoint is not None:
            _host_and_port(self.endpoint)

    @property
    def address(self) -> str:
        """Where other nodes reach this one: the address from which it would reach the endpoint."""
        if self.of == 1 or self.endpoint is None:
            return LOOPBACK
        family, kind, *_, target = _target(self.endpoint)
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket: this only looks up the route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(f"the rendezvous {self.endpoint} cannot be reached: {error.strerror or error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the nodes agreed on for one round, the store they share, and this node's own address."""

    attempt: int
    round: str
    store: Store
    address: str


class Nodes(RendezvousHandler):
    """A rendezvous that keeps the numbers the user gave the nodes, and whose every round has a store of its own."""

    def __init__(self, node: Node, identity: Mapping[str, Any], checkpoints: Checkpoints) -> None:
        self._node, self._identity, self._checkpoints = node, identity, checkpoints
        self._inner, self._keeps_store = _rendezvous_of(node)
        self._server: TCPStore | None = None
        self._common: Store | None = None
        self.meeting: Meeting | None = None
        self.next_attempt = 1
        self.waiting = False  # for other nodes: a signal may interrupt us then, and only then

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting = self._node.of > 1
        try:
            found = self._inner.next_rendezvous()
        finally:
            self.waiting = False
        self._common = found.store
        everybody = _exchange(found, "greeting", self._greeting())
        self._check(everybody)
        first = min(everybody, key=lambda greeting: int(greeting["node"]))
        if self._node.of > 1 and any(greeting["new"] for greeting in everybody):
            self._check_place(found, first["round"])
        self.meeting = Meeting(
            attempt=max(greeting["attempt"] for greeting in everybody),
            round=first["round"],
            store=found.store,
            address=self._node.address,
        )
        self.next_attempt = self.meeting.attempt + 1
        where = RendezvousStoreInfo(first["address"], first["port"])
        return RendezvousInfo(found.store, self._node.rank, found.world_size, where)

    def _greeting(self) -> dict[str, Any]:
        greeting = {"node": self._node.rank, "of": self._node.of, "attempt": self.next_attempt, **self._identity}
        greeting["new"] = self.meeting is None
        if self._node.rank == 0:
            address = self._node.address
            self._server = listen(address)
            greeting |= {"round": secrets.token_hex(6), "address": address, "port": self._server.port}
        return greeting

    def _check(self, everybody: list[dict[str, Any]]) -> None:
        """All see the same greetings, so all refuse alike."""
        if sorted(greeting["node"] for greeting in everybody) != list(range(self._node.of)):
            numbers = ", ".join(str(greeting["node"]) for greeting in everybody)
            raise BadInput(f"the nodes that met call themselves {numbers}: give each a --node-rank of its own.")
        for name in self._identity:
            if len({json.dumps(greeting.get(name)) for greeting in everybody}) > 1:
                raise BadInput(f"the nodes that met differ in {name}: give the same command on each.")

    def _check_place(self, found: RendezvousInfo, token: str) -> None:
        """Refuse, all alike, unless every node finds what node 0 leaves in the place of the checkpoints."""
        wrong = self._tried(self._checkpoints.leave, token) if self._node.rank == 0 else None
        _exchange(found, "left", {})
        if self._node.rank > 0:
            wrong = self._tried(self._checkpoints.find, token)
        everybody = _exchange(found, "found", {"node": self._node.rank, "wrong": wrong})
        if self._node.rank == 0 and wrong is None:
            self._checkpoints.forget(token)
        for each in sorted(everybody, key=lambda said: int(said["node"])):
            if each["wrong"]:
                with suppress(HoldfastError):
                    self._checkpoints.settle()  # we go, and what we began would go with us: the token stays nowhere
                raise BadInput(f"node {each['node']} cannot use the checkpoints: {each['wrong']}")

    def _tried(self, what: Callable[[str], None], token: str) -> str | None:
        try:
            what(token)
        except HoldfastError as error:
            return str(error)
        return None

    def publish(self, membership: Membership) -> None:
        """Tell the workers of this round who of them goes on."""
        if self._server is None:
            raise AssertionError("only the node that keeps the workers' store publishes")
        store = PrefixStore(f"holdfast/{self._met().round}/{LIVE}", self._server)
        publish(store, membership)

    def finish(self) -> bool:
        """Say that our workers have ended in order; whether those of every node have."""
        store = self._met().store
        store.set(f"holdfast/finished/{self._node.rank}", "")
        return bool(store.check([f"holdfast/finished/{each}" for each in range(self._node.of)]))

    def stop(self, verdict: str) -> None:
        """Tell the other nodes that the run is over, and how."""
        if self.meeting:
            with suppress(RuntimeError):  # whoever kept the store is gone, and with it the run
                self.meeting.store.set("holdfast/verdict", verdict)

    def stopped(self) -> str | None:
        """What another node said when it ended the run."""
        if self.meeting is None:
            return None
        store = self.meeting.store
        return store.get("holdfast/verdict").decode() if store.check(["holdfast/verdict"]) else None

    def leave(self, patience: float = 10.0) -> None:
        """Go; whoever keeps the store not before the others have heard from it how the run ended."""
        if self._common is None:
            return
        deadline = time.monotonic() + patience
        with suppress(RuntimeError):  # its keeper may be gone already
            left = self._common.add("holdfast/left", 1)
            while self._keeps_store and left < self._node.of and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._common.add("holdfast/left", 0)

    def _met(self) -> Meeting:
        if self.meeting is None:
            raise AssertionError("the nodes have not met")
        return self.meeting

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def shutdown(self) -> bool:
        return self._inner.shutdown()


class Alone(RendezvousHandler):
    """The rendezvous of a node that is alone: it takes place at once."""

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return _RUN_ID

    def get_backend(self) -> str:
        return "alone"

    def shutdown(self) -> bool:
        return True


def listen(address: str, port: int = 0, patience: timedelta = timedelta(minutes=5)) -> TCPStore:
    """A new store that listens on this address alone; torch by itself would listen on all."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as server:
        # A supervisor that starts again takes the port back from connections that the kernel still remembers.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
        port = server.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=server.detach(),
        )


def interface(address: str) -> str | None:
    """The network interface of this machine that has this address."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it may have none
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _rendezvous_of(node: Node) -> tuple[RendezvousHandler, bool]:
    """A way to meet the other nodes, and whether it is we who keep the store they meet in."""
    if node.of == 1 or node.endpoint is None:
        return Alone(), True
    # Torch's own store for workers lives as long as its rendezvous, and a node that comes back waits for its address
    # in vain; we bring one for each round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    store, host = _common_store(node.endpoint)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=node.endpoint,
        run_id=_RUN_ID,
        min_nodes=node.of,
        max_nodes=node.of,
        local_addr=node.address,
    )
    try:
        return create_handler(store, C10dRendezvousBackend(store, _RUN_ID), parameters), host
    except RendezvousError as error:
        raise _nobody_listens(node.endpoint) from error


def _common_store(endpoint: str) -> tuple[TCPStore, bool]:
    """The store in which all nodes meet, and whether it is we who keep it.

    Torch would guess by the machine's name whether to keep it, and then listen on every address. Only the machine that
    has the address can listen on it; of several nodes there the first one does, and the others find the port taken.
    """
    address, port = _target(endpoint)[-1][:2]
    with suppress(OSError):
        return listen(address, port, _PATIENCE), True
    try:
        return TCPStore(address, port, is_master=False, timeout=_PATIENCE), False
    except (RuntimeError, ValueError) as error:
        raise _nobody_listens(endpoint) from error


def _nobody_listens(endpoint: str) -> BadInput:
    return BadInput(f"nobody listens at the rendezvous {endpoint}: start the node that has this address.")


def _target(endpoint: str) -> tuple[Any, ...]:
    host, port = _host_and_port(endpoint)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise BadInput(f"the rendezvous {endpoint} is unknown here: {error.strerror or error}.") from error


def _exchange(found: RendezvousInfo, topic: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    """Tell every node of this round, and hear from every one, by the seats that torch gave them for it."""
    found.store.set(f"holdfast/{topic}/{found.rank}", json.dumps(said))
    return [json.loads(found.store.get(f"holdfast/{topic}/{seat}")) for seat in range(found.world_size)]


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BadInput(f"the rendezvous {endpoint!r} is not host:port, such as node0:29400.")
    return host.strip("[]"), int(port)
