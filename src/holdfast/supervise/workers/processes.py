"""What the kernel says of a worker: what it is doing, and how much of the processor it and its children have used."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_EXIT = 49  # which field is the exit status, from the state on


def state(pid: int) -> str:
    """One letter for its first thread: R it runs or could, S it sleeps, D it waits for a disk, T or t it is stopped."""
    fields = _fields(_PROC / str(pid))
    return fields[0] if fields else ""


def leaving(pid: int) -> int | None:
    """The exit status, as waitid gives it, of a process whose first thread has gone and whose other threads go; else nothing.

    Nobody can wait for such a process yet: it takes 0.2 s to give back a GPU. Nothing, too, if the kernel does not say.
    """
    fields = _fields(_PROC / str(pid))
    if len(fields) <= _EXIT or fields[0] != "Z" or not (status := int(fields[_EXIT])):
        return None  # 0 is what the kernel says where it would rather not
    return os.waitstatus_to_exitcode(status)


def processor_seconds(group: int) -> float | None:
    """What all processes of a group have used of the processor, or waited for it; nothing where the kernel does not say."""
    if not _PROC.exists():
        return None
    members = [(folder, fields) for folder, fields in _all() if fields[2] == str(group)]
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in members)
    return float(ticks / os.sysconf("SC_CLK_TCK")) + sum(_waited(folder) for folder, _ in members)


def _waited(folder: Path) -> float:
    """For how long its first thread was ready to run while others did: on a busy machine a worker is slow, not stuck.

    Only the first: on such a machine threads that merely look now and then wait for most of the time.
    """
    with suppress(OSError, IndexError, ValueError):  # it has gone, or the kernel does not say
        return int((folder / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _all() -> Iterator[tuple[Path, list[str]]]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (fields := _fields(folder)):
            yield folder, fields


def _fields(folder: Path) -> list[str]:
    """The fields of a process from its state on; none if it has gone."""
    with suppress(OSError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
