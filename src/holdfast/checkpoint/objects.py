"""A checkpoint store in an object store such as S3, accessed through fsspec. Only s3:// is tested."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from holdfast.checkpoint.store import FIRST_TERM, Reader, checked, conflict, is_name, refusal
from holdfast.errors import CommitConflict, HoldfastError

BLOCK = 32 << 20  # one part of an upload, one range of a download
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


class ObjectStore:
    """A checkpoint store in an object store such as S3. All its values are below one URL.

    If your program forks processes, create this object in each child, after the fork. The object uses an fsspec client,
    which runs a thread, and a forked child does not have the threads of its parent."""

    def __init__(self, url: str, **options: object) -> None:
        # Neither a shared instance nor a listing cache: a cached listing would hide the commits of other processes.
        own = {"skip_instance_cache": True, "use_listings_cache": False, **options}
        self.url = url.rstrip("/")
        with _reported("open", url):
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **own)

    def __str__(self) -> str:
        return self.url

    @property
    def term(self) -> int:
        return FIRST_TERM

    def owns(self, term: int) -> bool:
        return term == FIRST_TERM

    def require_present(self) -> None:
        pass  # without terms, no other nodes continue

    def put(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        with _reported("write", self._place(name)):
            rest, head = iter(parts), bytearray()
            for part in rest:
                head += part
                # Only S3's files are known to appear at once when closed, so only there larger values are streamed.
                if "s3" in self._fs.protocol and len(head) >= BLOCK:
                    break
            else:
                self._fs.pipe_file(self._path(name), bytes(head))
                return
            file = self._fs.open(self._path(name), "wb", block_size=BLOCK)
            try:
                for part in itertools.chain([bytes(head)], rest):
                    file.write(part)
                file.close()
            except BaseException:
                file.discard()
                file.closed = True  # otherwise its finalizer would complete the upload
                raise

    def create(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        with _reported("write", self._place(name)):
            value = b"".join(parts)
            try:
                self._fs.pipe_file(self._path(name), value, mode="create")
            except OSError as error:
                if not _already_there(error):
                    raise
                raise CommitConflict(conflict(self, name)) from error

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with _reported("read", self._place(name)):
            path = self._path(name)
            length = int(self._fs.info(path)["size"])

            def read_at(offset: int, buffer: memoryview) -> int:
                data = self._fs.cat_file(path, start=offset, end=min(offset + len(buffer), length))
                buffer[: len(data)] = data
                return len(data)

            yield Reader(length, _Ranges(self._fs, path, length).readinto, read_at)

    def names(self, prefix: str = "") -> list[str]:
        root, (folder, _, start_of_name) = self._root.rstrip("/"), prefix.rpartition("/")
        # S3 lists only the names that begin so: each of 1,024 ranks looks for its own file among those of all ranks.
        narrow = {"prefix": start_of_name} if "s3" in self._fs.protocol and start_of_name else {}
        with _reported("list", self.url):
            try:
                paths = self._fs.find(f"{root}/{folder}" if folder else self._root, **narrow)
            except FileNotFoundError:
                return []
        start = len(root) + 1
        names = (path[start:] for path in paths)
        # Some servers list an empty folder as an object without a name.
        return sorted(name for name in names if name.startswith(prefix) and is_name(name))

    def remove(self, name: str) -> None:
        with _reported("remove", self._place(name)):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def move(self, folder: str, to: str) -> None:
        """Move all objects from the folder `folder` to the folder `to`: copy them on the server, then remove the originals."""
        names = self.names(f"{checked(folder)}/")
        if self.names(f"{checked(to)}/"):
            raise CommitConflict(conflict(self, to))
        for name in names:
            with _reported("move", self._place(name)):
                self._fs.cp_file(self._path(name), self._path(to + name.removeprefix(folder)))
        for name in names:
            self.remove(name)

    def sweep(self, prefix: str) -> None:
        """Do nothing. To remove the parts of unfinished uploads, set a lifecycle rule of the bucket."""

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{checked(name)}"

    def _place(self, name: str) -> str:
        return f"{self.url}/{name}"


class _Ranges:
    def __init__(self, fs: Any, path: str, length: int) -> None:
        self._fs, self._path, self._length = fs, path, length
        self._fetched = 0
        self._block = memoryview(b"")

    def readinto(self, buffer: memoryview) -> int:
        if not self._block:
            if self._fetched >= self._length:
                return 0
            end = min(self._fetched + BLOCK, self._length)
            self._block = memoryview(self._fs.cat_file(self._path, start=self._fetched, end=end))
            self._fetched = end
        count = min(len(buffer), len(self._block))
        buffer[:count] = self._block[:count]
        self._block = self._block[count:]
        return count


def _already_there(error: OSError) -> bool:
    response = getattr(error.__cause__, "response", None) or {}
    return isinstance(error, FileExistsError) or response.get("Error", {}).get("Code") in _TAKEN


@contextmanager
def _reported(verb: str, place: str) -> Iterator[None]:
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:  # each fsspec backend has its own errors, and not all of them are OSErrors
        if isinstance(error, FileNotFoundError) and verb != "write":  # there it means that the bucket does not exist
            raise
        raise refusal(verb, place, error) from error
