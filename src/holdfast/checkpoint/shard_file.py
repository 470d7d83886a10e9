"""The file in which one rank saves its part of a snapshot: safetensors whose chunks of 1 MiB are verified one by one.

The last tensor of the file holds a digest of each chunk before it, and the snapshot's manifest has a digest of these
digests. So a reader of a few rows of one tensor reads and verifies only the chunks that contain them.
"""

import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast import memory
from holdfast.checkpoint import payload
from holdfast.checkpoint.digest import CHUNK as PIECE
from holdfast.checkpoint.digest import Digest, Progress, changed, opened, unwatched
from holdfast.checkpoint.payload import CHUNK, DIGEST_BYTES
from holdfast.checkpoint.store import DIRECT, Reader, Store, is_page_aligned
from holdfast.errors import BadInput

SEGMENT = 8 * CHUNK  # bytes of one read request
THREADS = 4  # that read one file


def put(store: Store, name: str, parts: Iterable[memoryview | bytes], progress: Progress = unwatched) -> Digest:
    """Write `parts` and the digests of their chunks to the store under `name`; return the digest for the manifest."""
    table, length = bytearray(), 0

    def passing() -> Iterator[memoryview]:
        nonlocal length
        hasher, room = xxhash.xxh3_128(), CHUNK
        for part in parts:
            view = memoryview(part)
            # Small pieces stay in the CPU cache until they are copied; memory for direct I/O is not copied.
            size = DIRECT if is_page_aligned(view) else PIECE
            for start in range(0, len(view), size):
                piece = view[start : start + size]
                rest = piece
                while rest:
                    taken, rest = rest[:room], rest[room:]
                    hasher.update(taken)
                    room -= len(taken)
                    if not room:
                        table.extend(hasher.digest())
                        hasher, room = xxhash.xxh3_128(), CHUNK
                length += len(piece)
                yield piece
                progress(len(piece))  # the store has taken it, because it asks for the next one
        if room < CHUNK:
            table.extend(hasher.digest())
        yield memoryview(bytes(table))
        progress(len(table))

    store.put(name, passing())
    return Digest(length + len(table), xxhash.xxh3_128_hexdigest(bytes(table)))


class ShardFile:
    """A committed file with the tensors of one rank. All bytes that it returns have been verified.

    `entries` has the dtype, shape and offsets of each tensor. A small read also reads the bytes around it and keeps
    them, so that reading the tensors in file order reads each chunk about once."""

    def __init__(self, store: Store, name: str, expected: Digest, progress: Progress = unwatched) -> None:
        self.name, self._store, self._expected, self._progress = name, store, expected, progress
        self._chunks = math.ceil(expected.length / (CHUNK + DIGEST_BYTES))
        self._length = expected.length - self._chunks * DIGEST_BYTES  # without the digests
        if not 0 <= (self._chunks - 1) * CHUNK < self._length:
            raise changed(name, f"it cannot have {expected.length} bytes")
        with opened(store, name, expected) as reader:
            self._digests = self._fill(reader, np.empty(self._chunks * DIGEST_BYTES, np.uint8), self._length).tobytes()
            progress(len(self._digests))
        if xxhash.xxh3_128_hexdigest(self._digests) != expected.xxh3:
            raise changed(name, "the digests of its chunks are not those that were committed")
        self._window, self._window_start = np.empty(0, np.uint8), 0
        self._memory = self._window  # of the window
        self.entries = payload.read_header(self.read, expected.length, name)

    def read(self, start: int, stop: int, *, keep: bool = True) -> npt.NDArray[np.uint8]:
        """Return the bytes from `start` up to `stop`; raise Corrupt if a chunk with any of them is damaged.

        Without `keep`, the result may be a view that is valid until the next call."""
        if not 0 <= start <= stop <= self._length:
            raise changed(self.name, f"bytes {start} to {stop} are not in it")
        begin, end = self._window_start, self._window_start + len(self._window)
        if not begin <= start <= stop <= end:
            begin = start // CHUNK * CHUNK
            end = min(max(math.ceil(stop / CHUNK) * CHUNK, begin + SEGMENT), self._length)
            if end - begin > SEGMENT:
                return self._verified(begin, end)[start - begin : stop - begin]
            self._move_window(begin, end)
        part = self._window[start - begin : stop - begin]
        return part.copy() if keep else part

    def read_all(self) -> npt.NDArray[np.uint8]:
        """Return the whole file in one buffer, including the digests; raise Corrupt if a chunk is damaged."""
        buffer = self._room(self._expected.length)
        known = 0 if self._window_start else len(self._window)  # the beginning was read with the header
        buffer[:known] = self._window[:known]
        self._drop_window()
        self._read_in_parallel(buffer[known : self._length], known)
        buffer[self._length :] = np.frombuffer(self._digests, np.uint8)
        return buffer

    def check(self) -> None:
        """Read the whole file in segments; raise Corrupt if a chunk is damaged."""
        self._drop_window()
        room = np.empty(min(SEGMENT, self._length), np.uint8)
        with opened(self._store, self.name, self._expected) as reader:
            for offset in range(0, self._length, SEGMENT):
                self._read_segment(reader, room[: self._length - offset], offset)

    def _move_window(self, begin: int, end: int) -> None:
        """Fill the window with the bytes from `begin` up to `end`. Its memory is reused: new memory would fragment."""
        if not len(self._memory):
            self._memory = self._room(min(SEGMENT, self._length))
        self._window = self._memory[:0]  # while it is filled, and if that fails
        self._read_in_parallel(self._memory[: end - begin], begin)
        self._window, self._window_start = self._memory[: end - begin], begin

    def _drop_window(self) -> None:
        """Free the window: a snapshot may have thousands of files."""
        self._memory = self._window = np.empty(0, np.uint8)
        self._window_start = 0

    def _verified(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        buffer = self._room(end - begin)
        self._read_in_parallel(buffer, begin)
        return buffer

    def _room(self, size: int) -> npt.NDArray[np.uint8]:
        memory.require(self.name, size)
        try:
            return np.empty(size, np.uint8)
        except MemoryError as error:
            raise BadInput(
                f"{self.name} needs {size} bytes of memory, more than there is: use a larger machine."
            ) from error

    def _read_in_parallel(self, buffer: npt.NDArray[np.uint8], begin: int) -> None:
        segments = [(buffer[i : i + SEGMENT], begin + i) for i in range(0, len(buffer), SEGMENT)]
        threads = min(THREADS, len(segments), os.cpu_count() or 1)
        with opened(self._store, self.name, self._expected) as reader:
            if threads < 2:
                for room, offset in segments:
                    self._read_segment(reader, room, offset)
                return
            with ThreadPoolExecutor(threads, "holdfast-read") as pool:
                for _ in pool.map(lambda segment: self._read_segment(reader, *segment), segments):
                    pass

    def _read_segment(self, reader: Reader, room: npt.NDArray[np.uint8], offset: int) -> None:
        self._fill(reader, room, offset)
        for start in range(0, len(room), CHUNK):
            number = (offset + start) // CHUNK
            expected = self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if xxhash.xxh3_128_digest(room[start : start + CHUNK].data) != expected:
                raise changed(self.name, f"chunk {number} of {self._chunks} has another digest")
        self._progress(len(room))

    def _fill(self, reader: Reader, room: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.uint8]:
        filled = 0
        while filled < len(room):
            count = reader.read_at(offset + filled, room.data[filled:])
            if not count:
                raise changed(self.name, "it ended early")
            filled += count
        return room
