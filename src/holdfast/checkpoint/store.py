"""The interface of checkpoint stores, which map names to bytes, and its implementation for a directory.

The content of a directory may be untrusted or damaged. So only regular files are opened, symbolic links below the root
are not followed, and lengths are compared with a limit before memory is allocated.
"""

import errno
import fcntl
import io
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from holdfast.errors import BadInput, CommitConflict, Corrupt, StorageFailed

TEMPORARY = ".tmp"
FIRST_TERM = 1  # the term of a run on one node, and of several that have lost none
WRITEBACK = 16 << 20  # bytes written before the kernel is asked to start writing them to the disk
SMALL = 16 << 20  # the largest value that is read whole; an index of 100,000 segments has this size
DIRECT = 16 << 20  # bytes of page-aligned memory in one direct write
AHEAD = 1 << 20  # bytes of one read-ahead request; Linux serves only the beginning of a larger one
_WORTH = 1 << 20  # bytes from which a direct write is worth it


@dataclass(frozen=True, slots=True)
class Reader:
    """A stored value opened for reading: its length in bytes, and two functions that fill a buffer.

    `readinto` continues where it stopped, like `io.RawIOBase.readinto`. `read_at` reads from an offset, and several
    threads may call it at once. Both return the number of bytes read, which may be less than the size of the buffer."""

    length: int
    readinto: Callable[[memoryview], int]
    read_at: Callable[[int, memoryview], int]


class Store(Protocol):
    """The interface of checkpoint stores, which map names to values. A name is a relative path, and a value is bytes.

    All writes are atomic. All methods raise StorageFailed if the storage fails."""

    @property
    def term(self) -> int:
        """The term of the nodes that save here: a number that grows when some nodes continue a run without the others."""

    def owns(self, term: int) -> bool:
        """Return True if `term` is the term of this store, and this node has not seen a newer term."""

    def require_present(self) -> None:
        """Raise WorkerLost if other nodes have continued the run without this node.

        In this case, all methods that write, such as `put` and `create`, also raise WorkerLost."""

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write the concatenated `parts` as the value of `name`. An older value of this name is replaced."""

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write the concatenated `parts` as the value of a new `name`. Raise CommitConflict if the name exists."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Open a value for reading. Raise FileNotFoundError if it does not exist, Corrupt if it is not a regular file."""

    def names(self, prefix: str = "") -> list[str]:
        """Return the sorted names that begin with `prefix`.

        If a folder cannot be listed, the result has the name of this folder in place of the names in it."""

    def remove(self, name: str) -> None:
        """Remove the value of `name`. Do nothing if the name does not exist."""

    def move(self, folder: str, to: str) -> None:
        """Rename the folder `folder` to the new name `to`. Do nothing if `folder` does not exist."""

    def sweep(self, prefix: str) -> None:
        """Remove the temporary files and empty folders that killed writers have left.

        Call this method only if no other process writes to the store."""


class DirectoryStore:
    """A checkpoint store in a directory: a name is the path of a file, and the value is the content of this file.

    Completed writes survive kills and power cuts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._is_within = self.path.parent.is_dir()

    def __str__(self) -> str:
        return str(self.path)

    @property
    def term(self) -> int:
        return FIRST_TERM

    def owns(self, term: int) -> bool:
        return term == FIRST_TERM

    def require_present(self) -> None:
        pass  # without terms, no other nodes continue

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self._write(name, parts, os.replace)

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        try:
            self._write(name, parts, _publish_new)
        except FileExistsError as error:
            raise CommitConflict(conflict(self, name)) from error

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with self._opened(name) as file:
            descriptor = file.fileno()
            yield Reader(
                length=os.fstat(descriptor).st_size,
                readinto=lambda buffer: file.readinto(buffer) or 0,
                read_at=lambda offset, buffer: os.preadv(descriptor, [buffer], offset),
            )

    def read_ahead(self, name: str, length: int) -> None:
        """Ask the operating system to read the first `length` bytes of the value `name` into memory ahead of time."""
        if hasattr(os, "posix_fadvise"):
            with self._opened(name) as file:
                for start in range(0, min(length, os.fstat(file.fileno()).st_size), AHEAD):
                    os.posix_fadvise(file.fileno(), start, AHEAD, os.POSIX_FADV_WILLNEED)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name, folder in self._entries(prefix) if not (folder or name.endswith(TEMPORARY)))

    def remove(self, name: str) -> None:
        self._unlink(checked(name))

    def move(self, folder: str, to: str) -> None:
        source, target = self._file(folder), self._file(to)
        with _reported("move", source), suppress(FileNotFoundError):
            self._require_clear("move", folder)
            self._require_clear("move", to)
            if os.path.lexists(target):
                raise CommitConflict(conflict(self, to))
            source.rename(target)
            _sync_directory(target.parent)
            if source.parent != target.parent:
                _sync_directory(source.parent)

    def sweep(self, prefix: str) -> None:
        # Files first, then the deepest folders: a folder may become empty with its contents.
        for name, folder in sorted(self._entries(prefix), key=lambda entry: (entry[1], -len(entry[0]))):
            if folder:
                if f"{name}/".startswith(prefix):
                    self._drop(self.path / name)
            elif name.endswith(TEMPORARY):
                self._unlink(name)

    def _unlink(self, name: str) -> None:
        path = self.path / name
        with _reported("remove", path), suppress(FileNotFoundError):
            self._require_clear("remove", name)
            path.unlink()
            _sync_directory(path.parent)
            for folder in path.parents[: len(PurePosixPath(name).parts) - 1]:
                self._drop(folder)

    def _drop(self, folder: Path) -> None:
        with suppress(OSError):  # not empty, or not ours to remove
            folder.rmdir()

    def _write(self, name: str, parts: Iterable[memoryview | bytes], publish: Callable[[str, str], None]) -> None:
        path = self._file(name)
        # In the same directory, because a rename cannot cross filesystems; with a random part for each writer.
        temporary = f"{path}.{secrets.token_hex(4)}{TEMPORARY}"
        with _reported("write", path):
            self._require_clear("write", name)
            if self._is_within and not self.path.parent.is_dir():  # the parent was moved: do not create it again
                raise StorageFailed(f"cannot write {path}: {self.path.parent} is gone. Was it moved or removed?")
            try:
                _make_directory(path.parent)
                _write_file(temporary, parts)
                publish(temporary, str(path))  # the commit point: before it the old value, after it the new one
            except BaseException as error:
                with suppress(OSError):
                    Path(temporary).unlink()
                if isinstance(error, FileNotFoundError):  # here it means that the directory is missing
                    raise refusal("write", path, error) from error
                raise
            _sync_directory(path.parent)  # the new name itself must survive a power cut

    @contextmanager
    def _opened(self, name: str) -> Iterator[io.FileIO]:
        path = self._file(name)
        with _reported("read", path):
            if obstacle := self._obstacle(name):
                raise Corrupt(f"{path} cannot be read: {obstacle}.")
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):  # opening a pipe would block, and opening a device may do harm
                raise Corrupt(f"{path} cannot be read: it is {_kind(mode)}, not a regular file.")
            with _opened(path) as file:
                yield file

    def _file(self, name: str) -> Path:
        return self.path / checked(name)

    def _obstacle(self, name: str) -> str | None:
        """Return a message about the first parent of `name` that is not a folder; None if all parents are folders."""
        for folder in reversed(PurePosixPath(name).parents[:-1]):
            try:
                mode = os.lstat(self.path / folder).st_mode
            except FileNotFoundError:
                return None
            if not stat.S_ISDIR(mode):
                return f"{folder} is {_kind(mode)} where a folder of its own should be"
        return None

    def _require_clear(self, verb: str, name: str) -> None:
        if obstacle := self._obstacle(name):
            raise StorageFailed(f"cannot {verb} {self.path / name}: {obstacle}; remove it.")

    def _entries(self, prefix: str) -> Iterator[tuple[str, bool]]:
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                with os.scandir(self.path / folder) as listed:  # a link to a folder is not a folder here
                    entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listed]
            except FileNotFoundError:
                continue  # never created, or removed since it was listed
            except OSError as error:
                if not folder:
                    raise refusal("list", self.path, error) from error
                yield folder[:-1], False
                continue
            for own_name, is_folder in entries:
                name = folder + own_name
                if not is_folder:
                    if name.startswith(prefix):
                        yield name, False
                elif f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                    yield name, True
                    waiting.append(f"{name}/")


def read(store: Store, name: str, limit: int = SMALL) -> bytes:
    """Return the bytes of a small value; raise Corrupt if it is larger than `limit` bytes."""
    with store.open(name) as reader:
        if reader.length > limit:
            raise Corrupt(f"{name} has {reader.length} bytes, more than {limit}: fall back to an older snapshot.")
        data, filled = bytearray(reader.length), 0
        while count := reader.readinto(memoryview(data)[filled:]):
            filled += count
    return bytes(data[:filled])


def is_page_aligned(part: memoryview) -> bool:
    """Return True if `part` begins on a page boundary and is large enough for direct I/O to be faster."""
    return len(part) >= _WORTH and np.frombuffer(part, np.uint8).ctypes.data % mmap.PAGESIZE == 0


def checked(name: str) -> str:
    """Return `name` unchanged; raise BadInput if it is not a plain relative path inside the store."""
    if not is_name(name):
        raise BadInput(f"{name!r} cannot name a stored value: use a plain relative path.")
    return name


def is_name(text: str) -> bool:
    """Return True if `text` is a plain relative path without "..", and not the name of a temporary file."""
    path = PurePosixPath(text)
    inside = not path.is_absolute() and ".." not in path.parts and "\0" not in text
    return bool(text) and inside and str(path) == text and not text.endswith(TEMPORARY)


def conflict(store: object, name: str) -> str:
    return f"{name} in {store} was already committed by another writer: give each run its own store."


def refusal(verb: str, place: object, error: BaseException) -> StorageFailed:
    """Return a StorageFailed error for an operation such as "write" on `place`, with its reason and advice."""
    number = error.errno if isinstance(error, OSError) else None
    advice = _ADVICE.get(number or 0, "check that the storage is reachable and healthy, then try again")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return StorageFailed(f"cannot {verb} {place}: {' '.join(str(reason).split())}; {advice}.")


_ROOM = "free some space, then try again"
_ACCESS = "check the permissions, and that it is not mounted read-only"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "the file size limit is too low for this state: raise it",
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: _ACCESS,
    errno.ENOTDIR: "a file is in the place of a directory: name another place",
}


@contextmanager
def _reported(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise  # part of the protocol
    except OSError as error:
        raise refusal(verb, path, error) from error


def _opened(path: Path) -> io.FileIO:
    # O_NONBLOCK and O_NOFOLLOW, in case it has become a pipe or a link since the check.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file any more")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def _write_file(path: str, parts: Iterable[memoryview | bytes]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    written = started = 0
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:  # a write may be short, for example on a full disk
                count = _write_direct(descriptor, rest, written) or os.write(descriptor, rest)
                rest, written = rest[count:], written + count
            if written - started >= WRITEBACK and hasattr(os, "posix_fadvise"):
                # Lets the disk write while the next part is hashed; benchmarks/store measures the gain. Linux writes dirty
                # pages out and drops only clean ones, so the file stays in the page cache.
                os.posix_fadvise(descriptor, started, written - started, os.POSIX_FADV_DONTNEED)
                started = written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_direct(descriptor: int, part: memoryview, position: int) -> int:
    """Write page-aligned memory with direct I/O, bypassing the page cache; return the number of bytes written.

    Return 0 if the file system does not support direct I/O."""
    whole = len(part) // mmap.PAGESIZE * mmap.PAGESIZE
    if position % mmap.PAGESIZE or not hasattr(os, "O_DIRECT") or not is_page_aligned(part):
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return os.write(descriptor, part[:whole])  # a third of the CPU time of a buffered write
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a filesystem without direct I/O, such as tmpfs
            raise
        return 0
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _publish_new(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # Without hard links, two writers at the same moment go undetected.
        if os.path.lexists(path):
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
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
