"""Checks of the available memory before a value is read or processes start, and a pause of the garbage collector.

The length in an untrusted manifest may be any number, so it is compared with the available memory first.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import BadInput

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def require(name: str, length: int) -> None:
    """Raise BadInput if a value of `length` bytes does not fit into the available memory; `name` is for the message."""
    if length > (free := available()):
        raise BadInput(
            f"{name} needs {length} bytes of memory and only {free} are free: use a larger machine, or remove it."
        )


def available() -> int:
    """Return the bytes of memory and swap that this process can still use, within the limit of its container."""
    try:
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        free = {words[0]: int(words[1]) * 1024 for words in lines}
        total = free["MemAvailable:"] + free["SwapFree:"]
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_limit()
    return total if limit is None else max(0, min(total, limit - _used_in_container()))


def require_room(processes: int, least: int, who: str, advice: str) -> None:
    """Raise BadInput if `processes` processes of `least` bytes each exceed the memory of this machine or container.

    In the message, `who` is a plural noun for the processes, and `advice` says what to do.
    """
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit()
    total = machine if limit is None else min(machine, limit)
    if processes * least > total:
        raise BadInput(
            f"{processes} {who} need {processes * least / 2**30:.3g} GiB of memory or more, and this machine has "
            f"{total / 2**30:.3g}: {advice}"
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collector in a `with` block, because it is slow while millions of objects are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _container_limit() -> int | None:
    try:
        return int((_CGROUP / "memory.max").read_text())
    except (OSError, ValueError):
        return None


def _used_in_container() -> int:
    try:
        lines = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines}["anon"]
    except (OSError, KeyError, ValueError, IndexError):
        return 0
