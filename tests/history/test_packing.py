"""Packing: every column of numbers comes back with the same bits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.history.packing import pack, unpack

NUMBERS = {
    "whole": (st.integers(-(2**63), 2**63 - 1), np.int64),
    "words": (st.integers(0, 2**64 - 1), np.uint64),
    "times": (st.integers(0, 2 * 10**15).map(lambda micros: micros / 1e6), np.float64),
    "losses": (st.floats(width=32), np.float64),
    "numbers": (st.floats(), np.float64),
}


def bits(column: NDArray[Any]) -> list[list[int]]:
    rows: list[list[int]] = np.ascontiguousarray(column).view(np.uint64).tolist()
    return rows


def packed_and_back(column: NDArray[Any]) -> NDArray[Any]:
    described, data = pack(column)

    def read() -> NDArray[np.uint8]:
        assert data is not None
        return data

    return np.broadcast_to(unpack(described, read), column.shape)


@pytest.mark.parametrize("kind", NUMBERS)
@given(data=st.data())
def test_every_value_comes_back_with_the_same_bits(kind: str, data: st.DataObject) -> None:
    values, dtype = NUMBERS[kind]
    steps = data.draw(st.integers(1, 8))
    rows = data.draw(st.lists(st.lists(values, min_size=steps, max_size=steps), min_size=1, max_size=4))
    column = np.array(rows, dtype)
    back = packed_and_back(column)
    assert back.dtype == column.dtype
    assert bits(back) == bits(column)


def test_negative_zero_is_not_zero() -> None:
    assert bits(packed_and_back(np.array([[-0.0, 0.5]]))) == bits(np.array([[-0.0, 0.5]]))


def test_equal_rows_are_stored_once_and_steady_numbers_take_no_bytes() -> None:
    described, data = pack(np.broadcast_to(np.arange(100), (16, 100)))
    assert described["shape"] == [1, 100]
    assert data is None


def test_times_take_as_few_bytes_as_their_microseconds_need() -> None:
    described, data = pack(np.array([[1.7e9, 1.7e9 + 0.000100, 1.7e9 + 0.000315]]))
    assert described["bytes"] == 1
    assert data is not None


def test_a_column_of_another_size_than_described_is_refused() -> None:
    described, data = pack(np.array([[1, 5, 3]]))
    assert data is not None
    with pytest.raises(ValueError, match="another size"):
        unpack(described, lambda: data[:, :-1])
    with pytest.raises(ValueError, match="too large"):
        unpack({**described, "shape": [1 << 20, 1 << 20]}, lambda: data)
