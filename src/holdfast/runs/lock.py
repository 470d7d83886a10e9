"""The folder of a run while it is in use: a lock against a second writer, and a check that it was not moved.

The lock is held from before the first write until after the last. Forked processes share a lock. Workers share the lock
of their supervisor, so that a new supervisor never starts beside the workers of a dead supervisor. The child processes
of workers do not share it, because an orphaned loader process would keep the folder locked.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

from holdfast.errors import BadInput, StorageFailed

FREE_WITHIN = 5.0
WATCH_EVERY = 0.5  # seconds
_held: WeakSet["Lock"] = WeakSet()
_alone: WeakValueDictionary[Path, "Lock"] = WeakValueDictionary()
_drops_in_children = False


class Lock:
    """A lock on the folder of a run. It is also released when this process and its children have exited."""

    def __init__(self, file: int) -> None:
        self._file = file
        _held.add(self)

    def release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(out: Path, node: int = 0) -> Lock:
    """Lock the folder `out` for node number `node`; raise BadInput if it is in use. Child processes share the lock."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = os.open(out / f".supervisor-{node}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageFailed(f"cannot use {out} for a run: {error.strerror or error}. Name another folder.") from error
    lock = Lock(file)
    deadline = time.monotonic() + FREE_WITHIN  # workers share the lock, and those of a dead supervisor die in a moment
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise BadInput(
                    f"{out} is in use by another supervisor or training: wait for it, or name another folder."
                ) from error
            time.sleep(0.05)
        except OSError as error:
            raise StorageFailed(f"cannot lock {out}: {error.strerror or error}. Name another folder.") from error


def is_held(out: Path, node: int = 0) -> bool:
    """Return True if a process holds the lock of node number `node` on the folder `out`."""
    try:
        file = os.open(out / f".supervisor-{node}.lock", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def others_hold(out: Path, node: int | None = None) -> bool:
    """Return True if a process holds the lock of any node on the folder `out`, except of number `node`."""
    names = (path.name.removeprefix(".supervisor-").removesuffix(".lock") for path in out.glob(".supervisor-*.lock"))
    return any(is_held(out, int(name)) for name in names if name.isdecimal() and int(name) != node)


def alone(out: Path) -> Lock:
    """Lock the folder `out` for a process that trains without a supervisor. Child processes do not share the lock."""
    keep_from_children()
    if before := _alone.pop(out.resolve(), None):
        before.release()
    _alone[out.resolve()] = lock = hold(out)
    return lock


def keep_from_children() -> None:
    """Make all child processes that are forked from now on give up the folder locks of this process."""
    global _drops_in_children
    if not _drops_in_children:
        os.register_at_fork(after_in_child=_drop)
        _drops_in_children = True


def _drop() -> None:
    for lock in list(_held):
        with suppress(OSError):
            lock.release()


class FolderWatch:
    """A watch on the folder of a run, which detects that it was moved or removed during training."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._looked, self._is_gone = folder, 0.0, False
        self._before = self._identity(None)

    def is_gone(self, *, now: bool = False) -> bool:
        """Return True if the folder was moved or removed; it is checked at most twice a second unless `now` is True."""
        if now or time.monotonic() - self._looked >= WATCH_EVERY:
            self._looked = time.monotonic()
            self._is_gone = self._identity(self._before) != self._before
        return self._is_gone

    def _identity(self, unknown: tuple[int, int] | None) -> tuple[int, int] | None:
        try:
            status = self._folder.stat()
        except FileNotFoundError:
            return None
        except OSError:  # a disk that does not answer was not moved
            return unknown
        return status.st_dev, status.st_ino
