"""Reads new events of a history file while its writer appends them."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.events import Event, parse
from holdfast.history.folded import folded, newest_lines
from holdfast.history.log import LONGEST, open_without_waiting

MOST = 1 << 22  # bytes that are read at once
NEWEST = 64  # steps of each segment that are returned of those that were folded before they were read


class GrowingFile:
    """A reader of a history file that grows. Lines that are there at the start are skipped, unless `from_start`."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._at = 0
        if not from_start:
            with suppress(OSError):
                self._at = path.stat().st_size

    def new(self) -> Iterator[Event]:
        """Yield the events that are new since the last call; an unfinished line is left for the next call."""
        for line in self.lines():
            with suppress(ValueError):  # the audit reports damage
                yield parse(line)

    def lines(self) -> list[bytes]:
        """Return the complete lines that are new since the last call, but at most about 4 MiB of them.

        Of the steps that were folded into segments before they were read, only the newest are returned."""
        lines: list[bytes] = []
        with suppress(OSError), open(self._path, "rb", opener=open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # a pipe or device by this name would block
                return []
            begin = self._at = min(self._at, status.st_size)  # a torn line was cut off
            file.seek(begin)
            while self._at < begin + MOST and (line := file.readline(LONGEST)):
                if b"\0" in line and (missed := self._folded_lines()):  # a hole: the lines are in segments
                    return [*lines, *missed]
                if line.endswith(b"\n"):
                    lines.append(line)
                elif len(line) < LONGEST:
                    break
                self._at += len(line)
        return lines

    def _folded_lines(self) -> list[bytes]:
        """Return the lines that were folded, from the next byte on, and continue after them."""
        lines: list[bytes] = []
        with suppress(HoldfastError):  # the audit reports damage
            for segment, part in folded(self._path).parts:
                if part.start >= self._at:
                    lines += newest_lines(segment, part, NEWEST)
                elif part.end > self._at:
                    before = part.start
                    for line in segment.lines(part):
                        lines += [line] if before >= self._at else []
                        before += len(line)
                self._at = max(self._at, part.end)
        return lines
