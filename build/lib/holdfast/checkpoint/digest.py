"""Digests of stored values, and sealed JSON records that contain a digest of their own content.

Bytes are hashed while they are written or read, and are used only if the digest matches.

Data is hashed in chunks that stay in the CPU cache until they are copied, which makes the digest nearly free. Memory
for direct I/O is not copied; it is passed on in large pieces, because each piece needs the interpreter lock.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast import memory
from holdfast.checkpoint.store import DIRECT, Reader, Store, is_page_aligned
from holdfast.errors import BadInput, Corrupt, FutureVersion

FORMAT = 2
"""The format version of everything written into a store. All versions have the same seal."""
CHUNK = 256 << 10
Progress: TypeAlias = Callable[[int], None]
"""A function called with the number of bytes just read or written, so that a slow transfer is not taken for a hang."""


def unwatched(count: int) -> None:
    """Do nothing. This is the default `progress` callback, which gets the number of bytes read or written."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The length in bytes of a stored value, and its xxh3-128 hash in hexadecimal."""

    length: int
    xxh3: str

    def __post_init__(self) -> None:
        # An untrusted manifest may have any value.
        if not (is_count(self.length) and isinstance(self.xxh3, str) and re.fullmatch("[0-9a-f]{32}", self.xxh3)):
            raise TypeError("a digest is a length and 32 hexadecimal digits")


def of_bytes(data: bytes) -> Digest:
    return Digest(len(data), xxhash.xxh3_128_hexdigest(data))


def put(store: Store, name: str, parts: Iterable[memoryview | bytes], progress: Progress = unwatched) -> Digest:
    """Write the concatenated `parts` to the store under `name`, and return their digest."""
    hasher, length = xxhash.xxh3_128(), 0

    def passing() -> Iterator[memoryview]:
        nonlocal length
        for part in parts:
            view = memoryview(part)
            size = DIRECT if is_page_aligned(view) else CHUNK
            for start in range(0, len(view), size):
                chunk = view[start : start + size]
                hasher.update(chunk)
                length += len(chunk)
                yield chunk
                progress(len(chunk))  # the store has taken it, because it asks for the next one

    store.put(name, passing())
    return Digest(length, hasher.hexdigest())


def fetch(store: Store, name: str, expected: Digest, progress: Progress = unwatched) -> npt.NDArray[np.uint8]:
    """Read the value `name` into a new buffer; raise Corrupt unless its digest is `expected`."""
    with opened(store, name, expected) as reader:
        memory.require(name, expected.length)
        try:
            buffer = np.empty(expected.length, np.uint8)
        except MemoryError as error:
            raise BadInput(
                f"{name} needs {expected.length} bytes of memory, more than there is: use a larger machine."
            ) from error
        whole = buffer.data
        _compare(name, expected, reader, (whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK)), progress)
    return buffer


def check(store: Store, name: str, expected: Digest, progress: Progress = unwatched) -> None:
    """Read the value `name` in chunks; raise Corrupt unless its digest is `expected`."""
    with opened(store, name, expected) as reader:
        room = memoryview(bytearray(CHUNK))
        left = (min(CHUNK, expected.length - i) for i in range(0, expected.length, CHUNK))
        _compare(name, expected, reader, (room[:size] for size in left), progress)


@contextmanager
def opened(store: Store, name: str, expected: Digest) -> Iterator[Reader]:
    """Yield a reader of the value `name`; raise Corrupt if it is missing or does not have the expected length."""
    try:
        with store.open(name) as reader:
            if reader.length != expected.length:
                raise changed(name, f"it has {reader.length} bytes, {expected.length} were committed")
            yield reader
    except FileNotFoundError as error:
        raise Corrupt(f"{name} is missing although it was committed: fall back to an older snapshot.") from error


def _compare(name: str, expected: Digest, reader: Reader, rooms: Iterator[memoryview], progress: Progress) -> None:
    hasher = xxhash.xxh3_128()
    for room in rooms:
        rest = room
        while rest:
            count = reader.readinto(rest)
            if not count:
                raise changed(name, "it ended early")
            rest = rest[count:]
        hasher.update(room)
        progress(len(room))
    if (actual := hasher.hexdigest()) != expected.xxh3:
        raise changed(name, f"digest {actual[:8]}, {expected.xxh3[:8]} was committed")


def changed(name: str, how: str) -> Corrupt:
    """Return a Corrupt error for the stored value `name`, which changed after its commit; `how` describes how."""
    return Corrupt(f"{name} changed after its commit ({how}): fall back to an older save")


def seal(record: dict[str, Any]) -> bytes:
    """Return `record` as JSON bytes, with the format version and a digest of its content added."""
    content = {"format": FORMAT, **record}
    return _canonical({**content, "digest": xxhash.xxh3_128_hexdigest(_canonical(content))})


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """Decode a record that `seal` encoded; raise Corrupt if a byte has changed, or FutureVersion for another format."""
    try:
        record = json.loads(data)
        digest = record.pop("digest")
        actual = xxhash.xxh3_128_hexdigest(_canonical(record))
        sound = digest == actual and data == _canonical({**record, "digest": digest})
        version = record["format"]
        if not is_count(version):
            raise TypeError("a format is a number")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise Corrupt(f"{name} is not a record of holdfast: fall back to an older snapshot.") from error
    if not sound:
        raise Corrupt(f"{name} does not match its own digest: fall back to an older snapshot.")
    if version != FORMAT:
        which = (
            "upgrade holdfast"
            if version > FORMAT
            else "continue with the holdfast that wrote it, or name another folder"
        )
        raise FutureVersion(f"{name} has format {version}, and this holdfast reads format {FORMAT}: {which}.")
    return dict(record)


def is_count(value: object) -> bool:
    """Return True if a JSON value is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def _canonical(content: dict[str, Any]) -> bytes:
    # Indented for people; sorted and compared byte by byte, so that damage to whitespace is detected too.
    return json.dumps(content, sort_keys=True, indent=2, allow_nan=False).encode() + b"\n"
