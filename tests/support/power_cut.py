"""A filesystem that forgets what was not synced: what a power cut may leave, worked out from a recorded save.

SIGKILL keeps the page cache, so that a missing fsync would never show; here it does.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Call = tuple[str, tuple[Any, ...]]
KEPT = ("synced", "names", "everything")
"""What a disk may have kept of unsynced data: nothing, only the names, or everything."""
NAMES = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")


@contextmanager
def recorded(place: Path, calls: list[Call]) -> Iterator[None]:
    """Record every call that changes something under a folder, with paths in place of file descriptors."""
    originals = {name: getattr(os, name) for name in (*NAMES, "close")}
    paths: dict[int, str] = {}

    def relative(path: Any) -> str:
        return os.path.relpath(path, place)

    def opened(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        descriptor = originals["open"](path, flags, *rest, **keywords)
        paths[descriptor] = relative(path)
        if flags & os.O_CREAT:
            calls.append(("open", (relative(path), bool(flags & os.O_TRUNC))))
        return int(descriptor)

    def written(descriptor: int, data: Any) -> int:
        count = originals["write"](descriptor, data)
        calls.append(("write", (paths[descriptor], bytes(data[:count]))))
        return int(count)

    def synced(descriptor: int) -> None:
        originals["fsync"](descriptor)
        calls.append(("fsync", (paths[descriptor],)))

    def named(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **keywords: Any) -> None:
            originals[name](*arguments, **keywords)
            count = 2 if name in ("replace", "link") else 1
            calls.append((name, tuple(relative(path) for path in arguments[:count])))

        return call

    try:
        os.open, os.write, os.fsync = opened, written, synced  # type: ignore[assignment]
        for name in NAMES[3:]:
            setattr(os, name, named(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


@dataclass(eq=False)
class File:
    """The bytes of a file as programs see them, and as the disk has them."""

    seen: bytes = b""
    synced: bytes = b""


@dataclass
class Disk:
    """Names as programs see them and as the disk has them; a directory is a name without a file."""

    seen: dict[str, File | None] = field(default_factory=dict)
    synced: dict[str, File | None] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Path) -> "Disk":
        disk = cls()
        for path in place.rglob("*"):
            data = path.read_bytes() if path.is_file() else None
            disk.seen[str(path.relative_to(place))] = None if data is None else File(data, data)
        disk.synced = dict(disk.seen)
        return disk

    def apply(self, call: Call) -> None:
        name, (path, *more) = call
        if name == "open":
            file = self.seen.setdefault(path, File())
            if more[0] and file:
                file.seen = b""
        elif name == "write":
            file = self.seen[path]
            assert file is not None
            file.seen += more[0]
        elif name == "fsync":
            self._sync(path)
        elif name == "mkdir":
            self.seen[path] = None
        elif name in ("unlink", "rmdir"):
            del self.seen[path]
        elif name == "link":
            self.seen[more[0]] = self.seen[path]
        elif name == "replace":
            self.seen[more[0]] = self.seen.pop(path)

    def _sync(self, path: str) -> None:
        file = self.seen.get(path)
        if file is not None:
            file.synced = file.seen
            return
        inside = {name for name in {*self.seen, *self.synced} if (os.path.dirname(name) or ".") == path}  # noqa: PTH120
        for name in inside:
            if name in self.seen:
                self.synced[name] = self.seen[name]
            else:
                self.synced.pop(name, None)

    def left(self, kept: str, place: Path) -> None:
        """Write the files that a power cut leaves."""
        tree = self.synced if kept == "synced" else self.seen
        place.mkdir()
        for name in sorted(tree):
            path, file = place / name, tree[name]
            if file is None:
                path.mkdir(exist_ok=True)
            elif path.parent.is_dir():  # a file is lost with its unsynced directory
                path.write_bytes(file.seen if kept == "everything" else file.synced)
