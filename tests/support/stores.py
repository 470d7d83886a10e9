"""Helpers for tests of stores."""

from collections.abc import Iterator

import pytest

from holdfast.errors import HoldfastError


def broken_off(*parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise RuntimeError("the state could not be read")


def one_line(error: pytest.ExceptionInfo[HoldfastError]) -> str:
    text = str(error.value)
    assert text.count("\n") == 0
    return text
