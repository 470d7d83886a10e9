"""What the kernel says of a worker: whether it is stopped, and how much of the processor it and its children have used."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def is_stopped(pid: int) -> bool:
    """Whether the process stands still until somebody continues it: SIGSTOP, a debugger."""
    fields = _fields(_PROC / str(pid))
    return bool(fields) and fields[0] in ("T", "t")


def processor_seconds(group: int) -> float | None:
    """What all processes of a group have used of the processor; nothing where the kernel does not say."""
    if not _PROC.exists():
        return None
    ticks = sum(sum(map(int, fields[11:15])) for fields in _all() if fields[2] == str(group))
    return float(ticks / os.sysconf("SC_CLK_TCK"))


def _all() -> Iterator[list[str]]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (fields := _fields(folder)):
            yield fields


def _fields(folder: Path) -> list[str]:
    """The fields of a process from its state on; none if it has gone."""
    with suppress(OSError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
