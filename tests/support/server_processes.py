"""The processes of served runs that tests look at and wait for."""

import os
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 300.0  # a start of Ray is a dozen processes: 97 s were seen on a busy machine
TITLES = ("ray::ServerNode", "ray::Worker", "ray::Controller")


def actors(*titles: str) -> set[int]:
    """The processes of nodes, workers and controllers on this machine that descend from this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").decode()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if words.startswith(titles or TITLES) and grandparent == os.getpid():
                found.add(int(entry.name))
    return found


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s until {what}"
        time.sleep(0.05)
