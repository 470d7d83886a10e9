"""Follows a history file while it grows."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.events import Event, parse

MOST = 1 << 22  # bytes of a history read at one look


class Growing:
    """The events that are added to one history file from now on; or all of it, from the beginning."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._at = 0
        if not from_start:
            with suppress(OSError):
                self._at = path.stat().st_size

    def new(self) -> Iterator[Event]:
        """The events since the last call; a line that is not whole yet waits for the next."""
        for line in self.lines():
            with suppress(ValueError):  # the audit reports damage, not the view
                yield parse(line)

    def lines(self) -> list[bytes]:
        """The whole lines since the last call, or some of them if they are very many."""
        with suppress(OSError):
            data = self._added()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole) or (len(data) if len(data) == MOST else 0)  # no line of ours is as long
            return whole.splitlines()
        return []

    def _added(self) -> bytes:
        """What was added to it, if it is a file still: a pipe or a device of that name would have us wait."""
        number = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                return b""
            self._at = min(self._at, found.st_size)  # a torn line was cut off
            return os.pread(number, MOST, self._at)
        finally:
            os.close(number)
