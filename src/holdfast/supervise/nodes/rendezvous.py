"""Settings of a node, the rendezvous of all nodes before workers start, and communication between nodes in training.

This module defines the interfaces and implements them for a single node; `multi_node.py` and `peers.py` implement them
for several nodes.
"""

import fcntl
import resource
import secrets
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public

from holdfast.checkpoint.terms import Term
from holdfast.distributed.membership import LIVE, Membership, publish
from holdfast.errors import BadInput
from holdfast.events import JSON
from holdfast.finding import counted

LOOPBACK = "127.0.0.1"
LOST_AFTER = 15.0
CONNECTIONS = 6  # of a worker to the workers' store, at most
OTHER_FILES = 512  # that a supervisor may have open
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The settings of this node: its number (`rank`), the number of nodes (`of`), and where they meet (`endpoint`)."""

    rank: int = 0
    of: int = 1
    endpoint: str | None = None
    least: int = 1  # nodes with which the run continues
    lost_after: float = LOST_AFTER  # seconds without a heartbeat

    def __post_init__(self) -> None:
        if self.of < 1 or not 0 <= self.rank < self.of:
            raise BadInput(f"--node-rank must be between 0 and --nnodes less 1 (got {self.rank} of {self.of}).")
        if self.of > 1 and self.endpoint is None:
            raise BadInput(f"{self.of} nodes need --rendezvous host:port, the address of one of them.")
        if self.endpoint is not None:
            _host_and_port(self.endpoint)
        if not 1 <= self.least <= self.of:
            raise BadInput(f"--min-nodes must be between 1 and {self.of} (got {self.least}).")
        if not self.lost_after > 0:
            raise BadInput(f"--lost-after must be greater than 0 (got {self.lost_after:g}).")

    @property
    def address(self) -> str:
        """The IP address at which other nodes can reach this node."""
        if self.of == 1 or self.endpoint is None:
            return LOOPBACK
        family, kind, *_, target = _resolved(self.endpoint)
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket: this only looks up the route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(f"cannot reach --rendezvous {self.endpoint}: {error.strerror or error}.") from error

    @property
    def meets_at(self) -> tuple[str, int]:
        address, port = _resolved(str(self.endpoint))[-1][:2]
        return address, port

    def too_few(self, *, have_met: bool) -> str:
        """Return the error message for too few nodes; `have_met` is True if all nodes were there before."""
        if not have_met:
            smaller = "or start with a smaller --nnodes, such as --nnodes 1"
            return f"fewer than {self.of} nodes came to {self.endpoint} in time; the same command continues, {smaller}"
        return (
            f"fewer than {self.least} of {self.of} nodes are left (--min-nodes), "
            "or the others continued without this one and cannot be reached in time; the same command continues"
        )


def _resolved(endpoint: str) -> tuple[Any, ...]:
    host, port = _host_and_port(endpoint)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise BadInput(f"cannot resolve --rendezvous {endpoint}: {error.strerror or error}.") from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BadInput(f"--rendezvous must be host:port, such as node0:29400 (got {endpoint!r}).")
    return host.strip("[]"), int(port)


class WorkerStatus(NamedTuple):
    """The status of a worker that has not failed: its process number `seat`, and the group in which it trains."""

    seat: int
    is_ready: bool = False
    membership: int | None = None
    number: int | None = None  # its member number for life; None for a spare


class MembersReport(NamedTuple):
    """The status of the workers of one or more nodes."""

    seen: tuple[WorkerStatus, ...] = ()
    broken: bool = False  # workers wait for a new training group although none was lost
    ended: bool = False  # some have nothing left to train
    goes_on: bool = True  # they could continue if a worker of another node were lost now

    @property
    def inside(self) -> tuple[int, ...]:
        """The process numbers of the workers that train, without workers that wait to join."""
        return tuple(worker.seat for worker in self.seen if worker.membership is not None)

    @property
    def ready(self) -> int:
        return sum(worker.is_ready for worker in self.seen)

    @classmethod
    def from_json(cls, data: list[Any]) -> "MembersReport":
        return cls(tuple(WorkerStatus(*worker) for worker in data[0]), *data[1:])


def merge_reports(reports: Iterable[MembersReport]) -> MembersReport:
    all_reports = list(reports)
    return MembersReport(
        tuple(worker for report in all_reports for worker in report.seen),
        any(report.broken for report in all_reports),
        any(report.ended for report in all_reports),
        all(report.goes_on for report in all_reports),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInfo:
    """The result of one rendezvous: the nodes, the number of workers on each, and the address of the workers' store."""

    attempt: int
    round: str
    address: str  # of this node
    nodes: tuple[int, ...] = (0,)
    workers: tuple[int, ...] = ()
    host: int = 0
    term: int = 0  # see checkpoint/terms.py; 0 for a single node
    node: int = 0  # the number of this node
    store: tuple[str, int] = (LOOPBACK, 0)  # address and port

    @property
    def index(self) -> int:
        return self.nodes.index(self.node)

    @property
    def world_size(self) -> int:
        return sum(self.workers)

    @property
    def ranks(self) -> range:
        first = sum(self.workers[: self.index])
        return range(first, first + self.workers[self.index])

    def started(self, workers: int, *, standby: bool) -> str:
        """Return the message that `workers` of this node start, or take over if they were on `standby`."""
        line = f"{counted(workers, 'standby worker')} took over" if standby else f"{counted(workers, 'worker')} started"
        return f"{line} here, {self.world_size} in all" if len(self.nodes) > 1 else line

    def news(self, before: "RoundInfo | None", of: int) -> list[str]:
        """Return messages to the user about missing nodes (of all `of` nodes), and about a new host since `before`."""
        lines = []
        if lost := sorted(set(range(of)) - set(self.nodes)):
            continues = "continues" if len(self.nodes) == 1 else "continue"
            lines.append(f"{node_names(self.nodes)} of {of} {continues} without {node_names(lost)}")
        if before is not None and before.host != self.host:
            lines.append(f"the nodes now meet at node {self.host}")
        return lines


class RunEnded(Exception):
    """Raised if the run is over. The message is the verdict as JSON, or empty if other nodes left no verdict."""


class TooFewNodes(Exception):
    """Raised if not enough nodes come to the rendezvous in time."""


class Peers:
    """The other nodes during training; this base class is for a single node, which has no others.

    `server` is the workers' TCPStore, if this node hosts it. `members` maps supervisors to node numbers, and `where`
    maps node numbers to the addresses of their rendezvous stores."""

    term: Term | None = None
    members: Mapping[str, int] = {}
    where: Mapping[int, str] = {}

    def __init__(self, round: str = "", server: Store | None = None) -> None:
        self._workers = f"holdfast/{round}"
        self._server = server

    @property
    def present(self) -> list[int]:
        """The numbers of the nodes that were not lost since the start, including this node."""
        return [*self.where]

    @property
    def decides(self) -> bool:
        """True if this node decides for all nodes which workers train together."""
        return self._server is not None

    def publish(self, membership: Membership) -> None:
        """Send `membership`, the group of workers that train together, to all workers."""
        assert self._server is not None, "only the node that keeps the workers' store publishes"
        publish(PrefixStore(f"{self._workers}/{LIVE}", self._server), membership)

    def report(self, report: MembersReport, known: int) -> list[Membership]:
        """Send `report` to the node that decides which workers train. Return the decisions numbered above `known`."""
        return []

    def reports(self) -> dict[int, MembersReport] | None:
        """Return the last report of each other node; None until all of them have sent a report.

        Return {} if this node does not decide which workers train."""
        return {}

    def announce_end(self) -> None:
        """Tell the other nodes that some workers have nothing left to train."""

    def is_ending(self) -> bool:
        """Return True if some workers of other nodes have nothing left to train."""
        return False

    def is_left_behind(self) -> bool:
        """Return True if the other nodes continue without this node."""
        return False

    def finish(self) -> bool:
        """Report that this node's workers have exited normally. Return True once all nodes have reported that."""
        return True

    def exchange_progress(self, progress: JSON) -> list[Any]:
        """Send the progress of this node's workers to the other nodes, and return their latest progress."""
        return []

    def lost(self, *, suspected: bool = False) -> list[int]:
        """Return the nodes without a heartbeat for too long; if `suspected`, also nodes whose supervisor has exited."""
        return []

    def gone(self) -> list[int]:
        """Return the nodes whose supervisor has exited; their machines refuse connections."""
        return []


class Rendezvous:
    """The agreement of all nodes on every start of the workers; this base class is for a run on one node."""

    def __init__(self, attempt: int) -> None:
        self.next_attempt = attempt
        self.round: RoundInfo | None = None  # the last one
        self.peers = Peers()
        self.prepared: tuple[RoundInfo, Peers] | None = None  # the next start of the workers, if it was prepared

    def prepare(self, workers: int) -> RoundInfo:
        """Return the result of the next call of `meet` in advance, for workers that are started before that call."""
        allow_connections(workers)
        server, name = listen(LOOPBACK), secrets.token_hex(6)
        store = LOOPBACK, server.port
        round = RoundInfo(attempt=self.next_attempt, round=name, address=LOOPBACK, workers=(workers,), store=store)
        self.prepared = round, Peers(name, server)
        return round

    def meet(self, workers: int) -> RoundInfo:
        """Wait for the other nodes, and return the result of the rendezvous. This node starts `workers` workers."""
        self.round = self._meet(workers)
        self.next_attempt = self.round.attempt + 1
        return self.round

    def _meet(self, workers: int) -> RoundInfo:
        if self.prepared is None:
            self.prepare(workers)
        assert self.prepared is not None
        (round, self.peers), self.prepared = self.prepared, None
        return round

    def drop(self, nodes: list[int]) -> bool:
        """Let the remaining workers continue without the lost `nodes`; return False if that is not possible."""
        return False

    def waiting_nodes(self) -> list[int]:
        """Return the numbers of the nodes that wait for the next start of all workers."""
        return []

    def stop(self, verdict: str) -> None:
        """Tell the other nodes that the run failed or was stopped; `verdict` is JSON text."""

    def stopped(self) -> str | None:
        """Return the verdict if another node has stopped the run, otherwise None."""
        return None

    def close(self, verdict: str) -> None:
        """Store `verdict` for nodes that come later, and close all connections."""


def allow_connections(workers: int) -> None:
    """Raise this process's soft limit of open files, within the hard limit, to keep a store for `workers` workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS * workers + OTHER_FILES
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def listen(address: str, port: int = 0) -> TCPStore:
    """Open a TCPStore server that listens only on `address`; port 0 is any free port."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as server:
        # A supervisor that starts again takes the port back from connections that the kernel still remembers.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
        port = server.getsockname()[1]
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def interface(address: str) -> str | None:
    """Return the name of the network interface with the IPv4 `address`, or None if this machine has none."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it may have no address
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def node_names(nodes: Sequence[int]) -> str:
    return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"
