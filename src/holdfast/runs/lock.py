"""That two writers never share the folder of a run: a lock, held from before the first write to after the last.

Processes that are forked share a lock. Workers are to share that of their supervisor: a new one then never starts
beside workers of a dead one. What a worker forks is not: an orphan of a loader would keep the folder locked.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from weakref import WeakSet, WeakValueDictionary

from holdfast.errors import BadInput, StorageFailed

FREE_WITHIN = 5.0
_held: WeakSet["Lock"] = WeakSet()
_alone: WeakValueDictionary[Path, "Lock"] = WeakValueDictionary()
_kept = False


class Lock:
    """The right to write into a folder, until it is released or this process and its workers are gone."""

    def __init__(self, file: int) -> None:
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Let others write there."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def hold(out: Path, node: int = 0) -> Lock:
    """Lock a folder for this process, and what it is going to fork; each node of a run has a lock of its own."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = os.open(out / f".supervisor-{node}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageFailed(f"cannot use {out} for a run: {error.strerror or error}. Name another folder.") from error
    lock = Lock(file)
    if not _locked(file, out):
        raise BadInput(f"{out} is in use by another supervisor or training: wait for it, or name another folder.")
    return lock


def is_held(out: Path, node: int = 0) -> bool:
    """Whether somebody writes into this folder now."""
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


def alone(out: Path) -> Lock:
    """Lock a folder for this process and nothing that it forks: it trains without a supervisor.

    A process that attaches to a folder twice, as in a notebook, goes on with the second.
    """
    keep_from_children()
    if before := _alone.pop(out.resolve(), None):
        before.release()
    _alone[out.resolve()] = lock = hold(out)
    return lock


def keep_from_children() -> None:
    """From now on whatever this process forks does without the locks."""
    global _kept
    if not _kept:
        os.register_at_fork(after_in_child=_drop)
        _kept = True


def _drop() -> None:
    for lock in list(_held):
        with suppress(OSError):
            lock.release()


def _locked(file: int, out: Path) -> bool:
    """Take the lock, if it becomes free in time: workers share it, and those of a dead supervisor take a moment to die."""
    deadline = time.monotonic() + FREE_WITHIN
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError as error:
            raise StorageFailed(f"cannot lock {out}: {error.strerror or error}. Name another folder.") from error
        else:
            return True
