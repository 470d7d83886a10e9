"""A board in shared memory on which light workers write what they have reached, without a message to anyone."""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_ENTRY = struct.Struct("<dqqqq")  # written by one process only


class Entry(NamedTuple):
    """What one worker process has reached: when it joined its membership, and which one that is."""

    time: float  # CLOCK_MONOTONIC, which all processes of a machine share
    attempt: int
    membership: int
    members: int
    pid: int


class Board:
    """A file in memory with an entry for each worker process, by its process number."""

    def __init__(self, path: Path, entries: int = 0) -> None:
        if entries:
            path.write_bytes(bytes(entries * _ENTRY.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def write(self, seat: int, entry: Entry) -> None:
        _ENTRY.pack_into(self._memory, seat * _ENTRY.size, *entry)

    def read(self) -> dict[int, Entry]:
        """Return the entries that were written, by process number."""
        entries = enumerate(Entry(*fields) for fields in _ENTRY.iter_unpack(self._memory))
        return {seat: entry for seat, entry in entries if entry.pid}
