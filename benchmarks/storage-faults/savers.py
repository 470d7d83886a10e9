"""The compared ways to save, and the injection of faults into each of them.

The other libraries are used as their documentation shows: a new name for every step, and a load of the newest. torch.save
writes to a temporary name that is then renamed, which is more than most scripts do. A fault that raises does so in the
middle of the file; a hidden fault is applied to the file afterwards, because no process reads it in between.
"""

import errno
import io
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
import torch.distributed.checkpoint as dcp

from holdfast.checkpoint import scrub, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.checkpoint.writer import overlapped
from holdfast.faults.schedule import at
from holdfast.faults.storage import POINTS, FaultyStore

State = dict[str, Any]
RAISED = {"io-error": errno.EIO, "enospc": errno.ENOSPC}
EXTRA = struct.pack(">d", 0.1)  # the learning rate as a pickle stores it


@dataclass(frozen=True)
class Fault:
    """A fault, and the part of a save that it strikes."""

    kind: str
    point: str


@dataclass(frozen=True)
class Loaded:
    """The loaded step and state, and a message about damaged files."""

    step: int
    state: State
    message: str = ""


class Saver(Protocol):
    """A way to save, and to load the newest state."""

    points: tuple[str, ...]
    renamed: tuple[str, ...]
    """The points that end with a rename."""

    def save(self, step: int, state: State, fault: Fault | None) -> str:
        """Save, and return a remark for the table, or an empty string."""

    def load(self) -> Loaded:
        """Load the newest state that this way can find."""


class Holdfast:
    """The overlapped writer; two snapshots are kept."""

    points = POINTS
    renamed = POINTS

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(folder)

    def save(self, step: int, state: State, fault: Fault | None) -> str:
        faults = at([step], kind=fault.kind, point=fault.point) if fault else ()
        writer = overlapped(FaultyStore(self.store, faults, delay=DELAY), keep_last=2, backoff=(0.0, 0.0))
        writer.save(step, {"weight": state["weight"]}, {"lr": state["lr"]})
        (saved,) = writer.close()
        return f"{saved.retries} retry" if saved.retries else ""

    def load(self) -> Loaded:
        newest = snapshot.newest(self.store)
        found = [finding.name for finding in scrub.verify(self.store)]
        message = f"verify names {', '.join(found)}" if found else ""
        return Loaded(newest.step, {"weight": newest.tensors["weight"], "lr": newest.extra["lr"]}, message)


class TorchSave:
    """torch.save to a temporary name, synced and renamed; torch.load of the newest file."""

    points = ("tensors", "extra", "directory of the file")
    renamed = points

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def save(self, step: int, state: State, fault: Fault | None) -> str:
        path, temporary = self.folder / f"{step:08d}.pt", self.folder / f"{step:08d}.tmp"
        with temporary.open("wb") as file:
            torch.save(state, Breaking(file, fault) if fault else file)
            file.flush()
            os.fsync(file.fileno())
        if fault and fault.kind == "lost-rename":
            return ""
        temporary.replace(path)
        if fault:
            damage(path, fault.kind, self._place(path, fault.point))
        return ""

    def load(self) -> Loaded:
        path = max(self.folder.glob("*.pt"))
        return Loaded(int(path.stem), torch.load(path, weights_only=True))

    def _place(self, path: Path, point: str) -> int:
        data = path.read_bytes()
        return {"tensors": len(data) // 2, "extra": data.find(EXTRA) + 2}.get(point, data.rfind(b"PK\x01\x02") + 4)


class Dcp:
    """DCP to a new folder for every step; load of the newest folder with metadata, which DCP writes last."""

    points = ("tensors", "extra", "metadata")
    renamed = ("metadata",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def save(self, step: int, state: State, fault: Fault | None) -> str:
        place = self.folder / f"{step:08d}"
        writer = dcp.FileSystemWriter(place)
        if fault:
            writer.fs = Breakable(fault)
        self._save(state, writer)
        if fault and fault.kind not in RAISED:
            file = place / ".metadata" if fault.point == "metadata" else next(place.glob("*.distcp"))
            data = file.read_bytes() if file.exists() else b""
            damage(file, fault.kind, data.find(EXTRA) + 2 if fault.point == "extra" else len(data) // 2)
        return ""

    def _save(self, state: State, writer: dcp.FileSystemWriter) -> None:
        dcp.save(state, storage_writer=writer)

    def load(self) -> Loaded:
        place = max(metadata.parent for metadata in self.folder.glob("*/.metadata"))
        state: State = {"weight": torch.zeros(COUNT), "lr": 0.0}
        dcp.load(state, checkpoint_id=place)
        return Loaded(int(place.name), state)


class DcpAsync(Dcp):
    """DCP in the background."""

    def _save(self, state: State, writer: dcp.FileSystemWriter) -> None:
        dcp.async_save(state, storage_writer=writer).result()


COUNT = 400_000
DELAY = 0.1


def state_of(step: int) -> State:
    """Return the state after `step` steps."""
    return {"weight": torch.full((COUNT,), float(step)), "lr": 0.1}


class Breaking(io.RawIOBase):
    """A file whose storage refuses or delays the second half."""

    def __init__(self, file: IO[bytes], fault: Fault) -> None:
        self.file, self.fault, self.left = file, fault, COUNT * 2

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.left -= memoryview(data).nbytes
        if self.left < 0 or self.fault.point == "metadata":
            if (number := RAISED.get(self.fault.kind)) is not None:
                raise OSError(number, os.strerror(number))
            if self.fault.kind == "delay":
                time.sleep(DELAY)
        return self.file.write(data)

    def tell(self) -> int:
        return self.file.tell()  # DCP notes where each tensor begins

    def flush(self) -> None:
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


class Breakable(dcp.filesystem.FileSystem):
    """DCP's view of the disk, with a fault in it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[IO[bytes]]:
        struck = ".metadata" in str(path) if self.fault.point == "metadata" else ".distcp" in str(path)
        with super().create_stream(path, mode) as stream:
            yield Breaking(stream, self.fault) if struck and "w" in mode else stream  # type: ignore[misc]

    def rename(self, path: Any, new_path: Any) -> None:
        if self.fault.kind != "lost-rename":
            super().rename(path, new_path)


def damage(path: Path, kind: str, place: int) -> None:
    """Damage a file as a disk may do without an error."""
    if kind == "torn-write":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "bit-flip":
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)


SAVERS: dict[str, Callable[[Path], Saver]] = {
    "holdfast": Holdfast,
    "torch.save": TorchSave,
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
}
