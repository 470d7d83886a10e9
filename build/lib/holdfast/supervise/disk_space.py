"""Waits for space after a worker has failed because its disk is full, so that no restarts are used up meanwhile."""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

WAITS = 600.0  # seconds
LOOKS = 1.0  # seconds between two looks
LEAST_ROOM = 16 << 20  # bytes: histories and logs need space, too
_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class DiskSpace:
    """A wait for free space on the disks of `folders`, after a worker found a disk full. `say` shows a message."""

    def __init__(self, folders: Iterable[Path], say: Callable[[str], None]) -> None:
        self._folders, self._say = tuple(folders), say
        self._until: float | None = None  # the deadline of the wait, kept after it has passed
        self._looked = 0.0

    def is_awaited(self, messages: Iterable[str], now: float) -> bool:
        """Return True if the error `messages` of workers say that a disk is full, and there is still too little space.

        Return False ten minutes after the first such message, so that the run ends. `now` is a clock reading in
        seconds."""
        if not any(map(_FULL.search, messages)):
            return False
        if self._until is None:
            self._until, self._looked = now + WAITS, 0.0
            room = max(map(needed, self._folders)) >> 20
            self._say(f"the disk is full: waiting up to {WAITS / 60:g} minutes for {room} MB to become free")
        if now >= self._until:
            return False
        if now - self._looked < LOOKS:
            return True
        self._looked = now
        if not all(has_room(folder, needed(folder)) for folder in self._folders if folder.is_dir()):
            return True
        self._until = None
        return False


def needed(folder: Path) -> int:
    """Return the bytes that must be free to continue: the largest snapshot in `folder`, and `LEAST_ROOM`."""
    sizes = (sum(path.stat().st_size for path in step.glob("*")) for step in folder.glob("step-*"))
    try:
        return LEAST_ROOM + max(sizes, default=0)
    except OSError:  # a snapshot was removed meanwhile
        return LEAST_ROOM


def has_room(folder: Path, size: int) -> bool:
    """Return False if a file of `size` bytes does not fit into `folder`; True if it does, or this is unknown."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return True
