"""Where checkpoint bytes live. A Store keeps named bytes; it knows nothing of tensors or steps."""

import errno
import fcntl
import io
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from holdfast.errors import BadInput, CommitConflict, StorageFailed

TEMPORARY = ".tmp"
WRITEBACK = 16 << 20  # bytes written before the disk is asked to begin on them
DIRECT = 16 << 20  # bytes of page-aligned memory that the disk takes at once


@dataclass(frozen=True, slots=True)
class Reader:
    """A stored value being read: its length, and a function that fills a buffer and says how much it filled."""

    length: int
    readinto: Callable[[memoryview], int]


class Store(Protocol):
    """Values by name. Names are relative, with slashes; what is written appears whole or not at all.

    A missing name raises FileNotFoundError on `open`; anything else that the storage refuses raises StorageFailed.
    """

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a value from its parts, in place of any older one."""

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a value that must not exist yet: of several writers one succeeds, the others get CommitConflict."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Read a value piece by piece."""

    def names(self, prefix: str = "") -> list[str]:
        """Every name that begins with `prefix`, in order; unfinished writes have no name."""

    def remove(self, name: str) -> None:
        """Forget a value; one that is not there is no error."""

    def sweep(self, prefix: str) -> None:
        """Throw away what killed writers of names with this prefix left behind. No writer of them may be at work."""


class DirectoryStore:
    """A directory of ordinary files, durable against kills and power cuts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self._write(name, parts, os.replace)

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        try:
            self._write(name, parts, _publish_new)
        except FileExistsError as error:
            raise CommitConflict(conflict(self, name)) from error

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        path = self._file(name)
        with _reported("read", path), io.FileIO(path) as file:
            yield Reader(os.fstat(file.fileno()).st_size, lambda buffer: file.readinto(buffer) or 0)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._files(prefix) if not name.endswith(TEMPORARY))

    def remove(self, name: str) -> None:
        self._unlink(self._file(name))

    def sweep(self, prefix: str) -> None:
        for name in self._files(prefix):
            if name.endswith(TEMPORARY):
                self._unlink(self.path / name)

    def _unlink(self, path: Path) -> None:
        with _reported("remove", path), suppress(FileNotFoundError):
            path.unlink()
            _sync_directory(path.parent)
            if path.parent != self.path:
                with suppress(OSError):  # not empty yet
                    path.parent.rmdir()

    def _write(self, name: str, parts: Iterable[memoryview | bytes], publish: Callable[[str, str], None]) -> None:
        path = self._file(name)
        # The same directory: a rename cannot cross filesystems. A random part: two writers never share a file.
        temporary = f"{path}.{secrets.token_hex(4)}{TEMPORARY}"
        with _reported("write", path):
            _make_directory(path.parent)
            try:
                _write_file(temporary, parts)
                publish(temporary, str(path))  # the commit point: before it the old value, after it the new one
            except BaseException:
                with suppress(OSError):
                    Path(temporary).unlink()
                raise
            _sync_directory(path.parent)  # the new name itself must outlive a power cut

    def _file(self, name: str) -> Path:
        return self.path / checked(name)

    def _files(self, prefix: str) -> Iterator[str]:
        with _reported("list", self.path):
            for folder, _, files in os.walk(self.path, onerror=_raise_unless_missing):
                place = Path(folder).relative_to(self.path)
                yield from (name for file in files if (name := (place / file).as_posix()).startswith(prefix))


def read(store: Store, name: str) -> bytes:
    """A small value, whole."""
    with store.open(name) as reader:
        data, filled = bytearray(reader.length), 0
        while count := reader.readinto(memoryview(data)[filled:]):
            filled += count
    return bytes(data[:filled])


def is_page_aligned(part: memoryview) -> bool:
    """Whether a disk can take this memory as it lies: it begins on a page and is worth a request of its own."""
    return len(part) >= _WORTH and np.frombuffer(part, np.uint8).ctypes.data % mmap.PAGESIZE == 0


_WORTH = 1 << 20


def checked(name: str) -> str:
    """A name that stays inside its store: manifests may come from strangers."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or name.endswith(TEMPORARY) or str(path) != name:
        raise BadInput(f"{name!r} cannot name a stored value: use a plain relative path")
    return name


def conflict(store: object, name: str) -> str:
    """What CommitConflict says, whichever the store."""
    return f"{name} in {store} was already committed by another writer: give each run a store of its own"


def refusal(verb: str, place: object, error: BaseException) -> StorageFailed:
    """What StorageFailed says, whichever the store; always one line."""
    number = error.errno if isinstance(error, OSError) else None
    advice = _ADVICE.get(number or 0, "see that the storage is reachable and sound, then try again")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return StorageFailed(f"cannot {verb} {place}: {' '.join(str(reason).split())}; {advice}")


_ROOM = "free some space, then try again"
_ACCESS = "check who may write there, and that it is not mounted read-only"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "the file size limit is too low for this state: raise it",
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.ENOTDIR: "a file stands where a directory should be: name another place",
}


@contextmanager
def _reported(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise  # these two have a meaning in the protocol
    except OSError as error:
        raise refusal(verb, path, error) from error


def _write_file(path: str, parts: Iterable[memoryview | bytes]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    written = started = 0
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:  # a write may be short, on a full disk above all
                count = _write_direct(descriptor, rest, written) or os.write(descriptor, rest)
                rest, written = rest[count:], written + count
            if written - started >= WRITEBACK:
                _start_writeback(descriptor, started, written - started)
                started = written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_direct(descriptor: int, part: memoryview, position: int) -> int:
    """Let the disk take memory as it lies, past the page cache; returns how much it took, 0 where it cannot.

    Nothing is copied, so that a save in the background takes a third of the processor time that it would take; and it
    does not push what training reads out of the cache.
    """
    whole = len(part) // mmap.PAGESIZE * mmap.PAGESIZE
    if position % mmap.PAGESIZE or not hasattr(os, "O_DIRECT") or not is_page_aligned(part):
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.write(descriptor, part[:whole])
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a filesystem that has no such way, such as tmpfs
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _start_writeback(descriptor: int, start: int, length: int) -> None:
    """Let the disk begin on what is written while the next part is hashed; benchmarks/store says what it gains.

    This advice makes Linux write dirty pages out, and drops only clean ones: the file stays in the page cache.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _publish_new(temporary: str, path: str) -> None:
    """Give a finished file its name unless the name is taken, in one step."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # A filesystem without hard links: two writers at the very same moment go undetected there.
        if Path(path).exists():
            raise FileExistsError(errno.EEXIST, "already there", path) from error
        os.replace(temporary, path)
    else:
        Path(temporary).unlink()


def _make_directory(path: Path) -> None:
    if path.is_dir():
        return
    _make_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir()
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
