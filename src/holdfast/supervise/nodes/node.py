"""The settings of one node of a run: its number, where it meets the others, and when one counts as lost."""

import socket
from dataclasses import dataclass
from typing import Any

from holdfast.errors import BadInput
from holdfast.supervise.nodes.rendezvous import LOOPBACK

LOST_AFTER = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Node number `rank` of `of`, which meets the others at `endpoint` (`host:port`).

    A node that is silent for `lost_after` seconds is lost; at least `least` nodes must be left to continue.
    """

    rank: int = 0
    of: int = 1
    endpoint: str | None = None
    least: int = 1
    lost_after: float = LOST_AFTER

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
        """The address of this node that the others can reach: the one from which it would reach the endpoint."""
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
        """The endpoint, as an address and a port."""
        address, port = _resolved(str(self.endpoint))[-1][:2]
        return address, port

    def too_few(self, *, have_met: bool) -> str:
        """Return why the run ends when not enough nodes met, for the first time or again."""
        if not have_met:
            return f"fewer than {self.of} nodes came to {self.endpoint}"
        return (
            f"fewer than {self.least} of {self.of} nodes are left (--min-nodes), "
            "or the others continued without this one and cannot be reached"
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
