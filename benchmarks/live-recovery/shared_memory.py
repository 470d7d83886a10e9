"""The segments of shared memory in /dev/shm that the processes of a run have left behind.

Other programs on the machine come and go there too. torch and OpenMP name a segment after the process that makes it
(torch_<pid>_<number>_<number>, __KMP_REGISTERED_LIB_<pid>_<user>), so the first number of a name says whose it is.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def left_by(pids: Iterable[int]) -> list[str]:
    """Return the names of the segments that the processes with these ids have made, in order."""
    owners = set(pids)
    return sorted(name for name in _segments() if _owner(name) in owners)


def _segments() -> list[str]:
    with suppress(OSError):
        return [path.name for path in Path("/dev/shm").iterdir()]
    return []


def _owner(name: str) -> int | None:
    number = re.search(r"\d+", name)
    return int(number[0]) if name.startswith(("torch_", "__KMP")) and number else None
