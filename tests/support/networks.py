"""Two networks that are joined by a cable: as near to two machines as one machine comes."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Networks:
    """Two network namespaces: their names, the address of the first, and the device of the second."""

    names: list[str]
    host: str
    device: str

    def pull_out(self) -> None:
        """Pull the cable out of the second network."""
        _ip("-n", self.names[1], "link", "set", self.device, "down")

    def plug_in(self) -> None:
        _ip("-n", self.names[1], "link", "set", self.device, "up")


@contextmanager
def joined_networks(subnet: int) -> Iterator[Networks | str]:
    """Yield two networks with the addresses 10.213.`subnet`.x, or the reason why this machine has none."""
    if not shutil.which("ip"):
        yield "no network namespaces here: there is no command ip"
        return
    names = [f"holdfast-{subnet}-{os.getpid()}-{i}" for i in (0, 1)]
    devices = [f"hf{subnet}-{os.getpid() % 100_000}-{i}" for i in (0, 1)]
    try:
        yield _joined(subnet, names, devices)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _joined(subnet: int, names: list[str], devices: list[str]) -> Networks | str:
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for i, (name, device) in enumerate(zip(names, devices, strict=True)):
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "address", "add", f"10.213.{subnet}.{i + 1}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return Networks(names, f"10.213.{subnet}.1", devices[1])


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
