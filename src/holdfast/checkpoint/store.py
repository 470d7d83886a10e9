"""Where checkpoint bytes live. A Store keeps named bytes; it knows nothing of tensors or steps.

A directory may come from a stranger, or be damaged. Only regular files are opened, no link below its root is followed
in reading, writing, listing or removing, and no length is believed before it is compared with a limit.
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
WRITEBACK = 16 << 20  # bytes written before the disk is asked to begin on them
SMALL = 16 << 20  # bytes of a value that is read whole: an index of 100,000 segments has as many
DIRECT = 16 << 20  # bytes of page-aligned memory that the disk takes at once
AHEAD = 1 << 20  # bytes of one request to read ahead: of a larger one Linux does only the beginning


@dataclass(frozen=True, slots=True)
class Reader:
    """A stored value being read: its length, and a function that fills a buffer and says how much it filled."""

    length: int
    readinto: Callable[[memoryview], int]


class Store(Protocol):
    """Values by name. Names are relative, with slashes; what is written appears whole or not at all.

    A missing name raises FileNotFoundError on `open`, one that stands for something else than bytes raises Corrupt;
    anything that the storage refuses raises StorageFailed.
    """

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a value from its parts, in place of any older one."""

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write a value that must not exist yet: of several writers one succeeds, the others get CommitConflict."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Read a value piece by piece."""

    def names(self, prefix: str = "") -> list[str]:
        """Every name that begins with `prefix`, in order; unfinished writes have no name.

        What stands in the way of a folder, or a folder that cannot be listed, is a name itself.
        """

    def remove(self, name: str) -> None:
        """Forget a value; one that is not there is no error."""

    def move(self, folder: str, to: str) -> None:
        """Give everything in a folder a name in another one, which must be new; nothing of it need be readable.

        A folder that is not there is no error.
        """

    def sweep(self, prefix: str) -> None:
        """Throw away what killed writers of names with this prefix left behind. No writer of them may be at work."""


class DirectoryStore:
    """A directory of ordinary files, durable against kills and power cuts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._is_within = self.path.parent.is_dir()

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
        with self._opened(name) as file:
            yield Reader(os.fstat(file.fileno()).st_size, lambda buffer: file.readinto(buffer) or 0)

    def read_ahead(self, name: str, length: int) -> None:
        """Ask the system to read the first `length` bytes of a value into its cache, so that they are there when it is opened."""
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
        # Folders last and the deepest first: each may hold others, and become empty with them.
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
        with suppress(OSError):  # not empty, or not ours to remove: it hides nothing
            folder.rmdir()

    def _write(self, name: str, parts: Iterable[memoryview | bytes], publish: Callable[[str, str], None]) -> None:
        path = self._file(name)
        # The same directory: a rename cannot cross filesystems. A random part: two writers never share a file.
        temporary = f"{path}.{secrets.token_hex(4)}{TEMPORARY}"
        with _reported("write", path):
            self._require_clear("write", name)
            if self._is_within and not self.path.parent.is_dir():  # it was moved, and is not to be made anew elsewhere
                raise StorageFailed(f"cannot write {path}: {self.path.parent} is gone. Was it moved or removed?")
            try:
                _make_directory(path.parent)
                _write_file(temporary, parts)
                publish(temporary, str(path))  # the commit point: before it the old value, after it the new one
            except BaseException as error:
                with suppress(OSError):
                    Path(temporary).unlink()
                if isinstance(error, FileNotFoundError):  # to a writer it means that there is no such directory
                    raise refusal("write", path, error) from error
                raise
            _sync_directory(path.parent)  # the new name itself must outlive a power cut

    @contextmanager
    def _opened(self, name: str) -> Iterator[io.FileIO]:
        path = self._file(name)
        with _reported("read", path):
            if obstacle := self._obstacle(name) or _no_file(path):
                raise Corrupt(f"{path} cannot be read: {obstacle}")
            with _opened(path) as file:
                yield file

    def _file(self, name: str) -> Path:
        return self.path / checked(name)

    def _obstacle(self, name: str) -> str | None:
        """What stands where this name has a folder, in words. The root itself may be a link: the user named it.

        A look before the act is enough here: what a folder holds is distrusted, not who may change it as we work.
        """
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
            raise StorageFailed(f"cannot {verb} {self.path / name}: {obstacle}; take it away")

    def _entries(self, prefix: str) -> Iterator[tuple[str, bool]]:
        """Every name that may begin with `prefix`, and whether it is a folder's; folders that cannot are left alone."""
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                entries = _looked_into(self.path / folder)
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
    """A small value, whole; one that is larger than it can be is not read at all."""
    with store.open(name) as reader:
        if reader.length > limit:
            raise Corrupt(
                f"{name} has {reader.length} bytes, more than the {limit} it can have: fall back to an older save"
            )
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
    if not is_name(name):
        raise BadInput(f"{name!r} cannot name a stored value: use a plain relative path")
    return name


def is_name(text: str) -> bool:
    """Whether a text can name a value: a plain relative path, and none that unfinished writes have."""
    path = PurePosixPath(text)
    inside = not path.is_absolute() and ".." not in path.parts and "\0" not in text
    return bool(text) and inside and str(path) == text and not text.endswith(TEMPORARY)


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


def _no_file(path: Path) -> str | None:
    """What this is in words, if it is no regular file: to open a pipe waits for ever, to open a device may do harm."""
    mode = os.lstat(path).st_mode
    return None if stat.S_ISREG(mode) else f"it is {_kind(mode)}, not a regular file"


def _opened(path: Path) -> io.FileIO:
    # Not blocking and not following: should it have become a pipe or a link since we looked, nothing waits or strays.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file any more")


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def _looked_into(folder: Path) -> list[tuple[str, bool]]:
    """What a folder holds, and what of it is a folder; a link to one is not."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return []  # never made, or removed since we looked


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
