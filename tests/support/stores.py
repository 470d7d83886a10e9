"""Helpers for tests of stores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.checkpoint.store import Reader, Store
from holdfast.errors import HoldfastError


def broken_off(*parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise RuntimeError("the state could not be read")


def one_line(error: pytest.ExceptionInfo[HoldfastError]) -> str:
    text = str(error.value)
    assert text.count("\n") == 0
    return text


class CountingStore:
    """A store that records which bytes are read: the name, first offset and last offset of each read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reads: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def bytes_read(self) -> int:
        return sum(stop - start for _, start, stop in self.reads)

    @contextmanager
    def open(self, name: str) -> Iterator[Reader]:
        with self._store.open(name) as reader:

            def read_at(offset: int, buffer: memoryview) -> int:
                count = reader.read_at(offset, buffer)
                self.reads.append((name, offset, offset + count))
                return count

            yield Reader(reader.length, reader.readinto, read_at)
