"""The ports on which processes listen, and ports that are free."""

import socket
import struct
from contextlib import suppress
from pathlib import Path

LISTENS = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the address and port of every TCP socket on which a process listens."""
    own = _sockets(pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = (fields := line.split())
            if state == LISTENS and fields[9] in own:
                address, port = local.split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if (target := str(each.readlink())).startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> str:
    """Decode an address of /proc/net/tcp, which is printed as words in the machine's byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return socket.inet_ntop(
        socket.AF_INET if len(words) == 1 else socket.AF_INET6, struct.pack(f"={len(words)}I", *words)
    )


def free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
