"""How much memory there is to read a snapshot into: a length in a stranger's manifest may be any number.

Whether this machine has memory for so many processes, before any of them is started.
"""

import os
from pathlib import Path

from holdfast.errors import BadInput

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")


def require(name: str, length: int) -> None:
    """Refuse to read a value for which there is no room.

    This is no damage to fall back from: the snapshot may be good, and a larger machine can read it.
    """
    if length > (room := available()):
        raise BadInput(
            f"{name} takes {length} bytes of memory and {room} are free: restore where there is more, or remove it"
        )


def available() -> int:
    """How many bytes this process could take without pushing others out: what is free, within its container."""
    try:
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        free = {words[0]: int(words[1]) * 1024 for words in lines}
        room = free["MemAvailable:"] + free["SwapFree:"]
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(room, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return room


def require_room(processes: int, least: int, who: str, advice: str) -> None:
    """Refuse more processes than fit, if each takes at least so many bytes: the kernel would end others for them."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if processes * least > there:
        raise BadInput(
            f"{processes} {who} need {processes * least / 2**30:.3g} GiB of memory or more, and this machine has "
            f"{there / 2**30:.3g}: {advice}"
        )
