"""A checkpoint store that fails on purpose, once at a chosen point of a chosen save.

Some faults raise an error. Others are silent, as on a bad disk, and are detected only by comparing digests.

    kind          effect at the point                                             raises
    io-error      the first try fails                                             yes
    enospc        every try fails for as long as this save is tried               yes
    delay         the operation takes longer                                      no, but nothing is lost
    torn-write    only the first half is written                                  no
    bit-flip      one bit is flipped                                              no
    lost-rename   the file never gets its name: an older value stays, if any      no

At the point `removal`, when an old snapshot is deleted, the last three kinds leave a file behind: its first half, the
file with one flipped bit, or the whole file.
"""

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeAlias

from holdfast.checkpoint.store import Reader, Store, read, refusal
from holdfast.errors import BadInput
from holdfast.faults.schedule import Failure, Schedule

KINDS = ("io-error", "enospc", "delay", "torn-write", "bit-flip", "lost-rename")
POINTS = ("tensors", "extra", "manifest", "latest", "removal")
_POINT_OF = {".safetensors": "tensors", "extra.json": "extra", "manifest.json": "manifest"}  # by the end of the name
_NAME = re.compile(r"step-([0-9]{8,})(?:-term-[0-9]{8})?/(.+)")
_REFUSED = {"io-error": errno.EIO, "enospc": errno.ENOSPC}

Parts: TypeAlias = Iterable[memoryview | bytes]
Record: TypeAlias = Callable[[Failure], None]


class FaultyStore:
    """A checkpoint store that passes calls on to `store`, but breaks saves on purpose, to test recovery.

    Each fault in `faults` is injected once, in the first save at or after its step. `record(fault)` is called just
    before."""

    def __init__(
        self, store: Store, faults: Schedule, *, delay: float = 5.0, record: Record = lambda failure: None
    ) -> None:
        self._store, self._delay, self._record = store, delay, record
        self._due = sorted((fault for fault in faults if fault.kind in KINDS), key=lambda fault: fault.step)
        self._full: tuple[int, str] | None = None  # the save and the point without space
        self._step, self._committed = -1, False
        for fault in self._due:
            if _point(fault) not in POINTS:
                raise BadInput(f"{fault.kind} cannot strike at {fault.point!r}: choose {', '.join(POINTS)}.")

    def __str__(self) -> str:
        return str(self._store)

    @property
    def term(self) -> int:
        return self._store.term

    def owns(self, term: int) -> bool:
        return self._store.owns(term)

    def require_present(self) -> None:
        self._store.require_present()

    def put(self, name: str, parts: Parts) -> None:
        self._write(name, parts, self._store.put)

    def create(self, name: str, parts: Parts) -> None:
        self._write(name, parts, self._store.create)

    def open(self, name: str) -> AbstractContextManager[Reader]:
        return self._store.open(name)

    def names(self, prefix: str = "") -> list[str]:
        return self._store.names(prefix)

    def remove(self, name: str) -> None:
        # Before the commit, leftovers are removed; after it, snapshots that have become too old.
        kind = self._inject("removal", "remove", name) if self._committed else None
        if kind in ("torn-write", "bit-flip"):
            self._store.put(name, _damaged(kind, [read(self._store, name, sys.maxsize)]))
        elif kind != "lost-rename":
            self._store.remove(name)

    def move(self, folder: str, to: str) -> None:
        self._store.move(folder, to)

    def sweep(self, prefix: str) -> None:
        self._store.sweep(prefix)

    def _write(self, name: str, parts: Parts, write: Callable[[str, Parts], None]) -> None:
        point = self._point_of(name)
        kind = self._inject(point, "write", name) if point else None
        if kind in ("torn-write", "bit-flip"):
            write(name, _damaged(kind, parts))
        elif kind == "lost-rename":
            for _ in parts:  # a digest computed on the way covers every byte
                pass
        else:
            write(name, parts)
        self._committed = self._committed or point == "manifest"

    def _point_of(self, name: str) -> str | None:
        from holdfast.checkpoint.manifest import LATEST  # not needed to read the settings of a run

        if name == LATEST:
            return "latest"
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if int(match[1]) != self._step:
            self._step, self._committed = int(match[1]), False
        return next((point for end, point in _POINT_OF.items() if match[2].endswith(end)), None)

    def _inject(self, point: str, verb: str, name: str) -> str | None:
        """Inject the fault that is due at `point` of a save, and return its kind, or None if no fault is due.

        An error message contains `verb` (such as "write") and the file `name`."""
        fault = next((due for due in self._due if due.step <= self._step and _point(due) == point), None)
        if fault is not None:
            self._due.remove(fault)
            self._record(fault)
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
    whole = [memoryview(part) for part in parts]  # views: only the part that changes is copied
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
