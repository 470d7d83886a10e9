"""The network addresses of this machine: a store that listens on one of them, and the interface that has one."""

import fcntl
import socket
import struct
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is public

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
