"""One of the machines of a run: its number among them, where it meets the others, and when one counts as lost.

The network addresses of this machine: a store that listens on one of them, and the interface that has one.
"""

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public

from holdfast.errors import BadInput

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def listen(address: str, port: int = 0) -> TCPStore:
    """A new store that listens on this address alone; torch by itself would listen on all."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as server:
        # A supervisor that starts again takes the port back from connections that the kernel still remembers.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(where)
        server.listen(1024)
        port = server.getsockname()[1]
        return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())


def interface(address: str) -> str | None:
    """The network interface of this machine that has this address."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # it may have none
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


LOST_AFTER = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Node number `rank` of `of`; several meet at an endpoint `host:port`.

    A node that was not heard of for `lost_after` seconds is lost; at least `least` of them must be left to go on.
    """

    rank: int = 0
    of: int = 1
    endpoint: str | None = None
    least: int = 1
    lost_after: float = LOST_AFTER

    def __post_init__(self) -> None:
        if self.of < 1 or not 0 <= self.rank < self.of:
            raise BadInput(f"there is no node {self.rank} of {self.of}: --node-rank counts from 0 to --nnodes less 1.")
        if self.of > 1 and self.endpoint is None:
            raise BadInput(f"{self.of} nodes have nowhere to meet: name one of them with --rendezvous host:port.")
        if self.endpoint is not None:
            _host_and_port(self.endpoint)
        if not 1 <= self.least <= self.of:
            raise BadInput(f"{self.least} of {self.of} nodes cannot go on: give --min-nodes 1 to {self.of}.")
        if not self.lost_after > 0:
            raise BadInput(f"no node is lost after {self.lost_after:g} s: give --lost-after more than 0 seconds.")

    @property
    def address(self) -> str:
        """Where other nodes reach this one: the address from which it would reach the endpoint."""
        if self.of == 1 or self.endpoint is None:
            return LOOPBACK
        family, kind, *_, target = _resolved(self.endpoint)
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # a datagram socket: this only looks up the route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(f"the rendezvous {self.endpoint} cannot be reached: {error.strerror or error}.") from error

    @property
    def meets_at(self) -> tuple[str, int]:
        """The endpoint, as an address and a port."""
        address, port = _resolved(str(self.endpoint))[-1][:2]
        return address, port

    def too_few(self, *, have_met: bool) -> str:
        """What is said when not enough nodes came together, at first or again."""
        if not have_met:
            return f"fewer than {self.of} nodes came to {self.endpoint}"
        return (
            f"fewer than {self.least} of {self.of} nodes are left (--min-nodes), "
            "or the others went on without this one and cannot be reached"
        )


def several(nodes: Sequence[int]) -> str:
    """Nodes by their numbers, in words."""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"


def _resolved(endpoint: str) -> tuple[Any, ...]:
    host, port = _host_and_port(endpoint)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise BadInput(f"the rendezvous {endpoint} is unknown here: {error.strerror or error}.") from error


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BadInput(f"the rendezvous {endpoint!r} is not host:port, such as node0:29400.")
    return host.strip("[]"), int(port)
