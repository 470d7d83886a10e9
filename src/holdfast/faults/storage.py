"""Storage that fails on purpose: a store that strikes once at a chosen point of a chosen save, as a schedule says.

Some faults show, and the store raises; others are hidden: it says that all went well, as bad disks do. A reader finds
those by their digests.

    kind          what happens at the point                                       shows
    io-error      the first try is refused                                        yes
    enospc        every try is refused for as long as this save is tried          yes
    delay         it takes longer                                                 no, but nothing is lost
    torn-write    only the first half is there                                    no
    bit-flip      one bit is another                                              no
    lost-rename   it never gets its name: the older value stays, if there was one no

A removal writes nothing; there the last three mean that it never reaches the disk, and leave half of the value, one
with a flipped bit, and the value.
"""

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeAlias

from holdfast.checkpoint.snapshot import LATEST
from holdfast.checkpoint.store import Reader, Store, read, refusal
from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure, Schedule

KINDS = ("io-error", "enospc", "delay", "torn-write", "bit-flip", "lost-rename")
POINTS = ("tensors", "extra", "manifest", "latest", "removal")
_POINT_OF = {"state.safetensors": "tensors", "extra.json": "extra", "manifest.json": "manifest"}
_NAME = re.compile(r"step-([0-9]{8,})/(.+)")
_REFUSED = {"io-error": errno.EIO, "enospc": errno.ENOSPC}

Parts: TypeAlias = Iterable[memoryview | bytes]
Tell: TypeAlias = Callable[[Failure], None]


class Faulty:
    """A store with faults. Each strikes in the first save at or after its step, at its `point` (or at the tensors).

    `tell` hears of a fault just before it strikes, in whichever thread writes. Failures of other kinds are not of
    storage and pass by.
    """

    def __init__(
        self, store: Store, faults: Schedule, *, delay: float = 5.0, tell: Tell = lambda failure: None
    ) -> None:
        self._store, self._delay, self._tell = store, delay, tell
        self._due = sorted((fault for fault in faults if fault.kind in KINDS), key=lambda fault: fault.step)
        self._full: tuple[int, str] | None = None  # the save, and its point, for which there is no space
        self._step, self._committed = -1, False
        for fault in self._due:
            if _point(fault) not in POINTS:
                raise BadInput(f"{fault.kind} cannot strike at {fault.point!r}: a save has {', '.join(POINTS)}")

    def __str__(self) -> str:
        return str(self._store)

    def put(self, name: str, parts: Parts) -> None:
        self._write(name, parts, self._store.put)

    def create(self, name: str, parts: Parts) -> None:
        self._write(name, parts, self._store.create)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self._store.open(name)

    def names(self, prefix: str = "") -> list[str]:
        return self._store.names(prefix)

    def remove(self, name: str) -> None:
        # What is removed before the commit are leftovers; after it, snapshots that have become too old.
        kind = self._strikes("removal", "remove", name) if self._committed else None
        if kind in ("torn-write", "bit-flip"):
            self._store.put(name, _damaged(kind, [read(self._store, name, sys.maxsize)]))
        elif kind != "lost-rename":
            self._store.remove(name)

    def move(self, folder: str, to: str) -> None:
        self._store.move(folder, to)

    def sweep(self, prefix: str) -> None:
        self._store.sweep(prefix)

    def _write(self, name: str, parts: Parts, write: Callable[[str, Parts], None]) -> None:
        point = self._entered(name)
        kind = self._strikes(point, "write", name) if point else None
        if kind in ("torn-write", "bit-flip"):
            write(name, _damaged(kind, parts))
        elif kind == "lost-rename":
            for _ in parts:  # whoever computes a digest on the way sees every byte
                pass
        else:
            write(name, parts)
        self._committed = self._committed or point == "manifest"

    def _entered(self, name: str) -> str | None:
        """Which point of a save it is to write this name; a save begins with the first name of its step."""
        if name == LATEST:
            return "latest"
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if int(match[1]) != self._step:
            self._step, self._committed = int(match[1]), False
        return _POINT_OF.get(match[2])

    def _strikes(self, point: str, verb: str, name: str) -> str | None:
        """The kind of fault that strikes here and now, if it is one that does not show."""
        fault = next((due for due in self._due if due.step <= self._step and _point(due) == point), None)
        if fault is not None:
            self._due.remove(fault)
            self._tell(fault)
            if fault.kind == "enospc":
                self._full = (self._step, point)
        kind = fault.kind if fault else "enospc" if self._full == (self._step, point) else None
        if kind in _REFUSED:
            number = _REFUSED[kind]
            raise refusal(verb, f"{self}/{name}", OSError(number, os.strerror(number)))
        if kind == "delay":
            time.sleep(self._delay)
        return kind


def _point(fault: Failure) -> str:
    return "tensors" if fault.point == "boundary" else fault.point


def _damaged(kind: str, parts: Parts) -> list[memoryview | bytes]:
    """The first half of a value, or all of it with one bit flipped in the middle."""
    whole = [memoryview(part) for part in parts]  # views: nothing is copied but the part that changes
    half = sum(len(part) for part in whole) // 2
    damaged: list[memoryview | bytes] = []
    for i, part in enumerate(whole):
        if len(part) > half:
            if kind == "torn-write":
                return [*damaged, part[:half]]
            flipped = bytearray(part)
            flipped[half] ^= 1
            return [*damaged, bytes(flipped), *whole[i + 1 :]]
        damaged.append(part)
        half -= len(part)
    return damaged
