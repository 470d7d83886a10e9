"""Two tensors are compared by their bits, a piece at a time, and the largest difference is exact for every dtype."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.payload import DTYPES, torch_dtype
from holdfast.checkpoint.sharding import Box
from holdfast.checkpoint.stored_tensor import StoredTensor, of_tensor
from holdfast.compare.tensor_bits import DifferentBits, different_bits, pieces

NAN, INF = math.nan, math.inf


def compared(one: torch.Tensor, other: torch.Tensor) -> DifferentBits:
    return different_bits(of_tensor(one), of_tensor(other))


@pytest.mark.parametrize(
    ("one", "other", "count", "largest"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0, 0),
        ([1.0, 2.0, 3.0], [1.5, 2.0, 1.0], 2, 2.0),
        ([0.0], [-0.0], 1, 0.0),
        ([NAN, 1.0], [NAN, 1.0], 0, 0),
        ([NAN, 1.0], [2.0, 1.0], 1, NAN),
        ([INF, 1.0], [-INF, 2.0], 2, INF),
        ([INF], [INF], 0, 0),
    ],
)
def test_floats_differ_by_their_bits(one: list[float], other: list[float], count: int, largest: float) -> None:
    found = compared(torch.tensor(one), torch.tensor(other))
    assert found.count == count
    assert found.largest == pytest.approx(largest, nan_ok=True)


def test_nans_with_other_bits_differ() -> None:
    one = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = compared(one, one.flip(0))
    assert found.count == 2
    assert math.isnan(found.largest)


@pytest.mark.parametrize(
    ("dtype", "one", "other", "largest"),
    [
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.int64, 2**60, 2**60 + 1, 1),
        (torch.int8, -128, 127, 255),
        (torch.uint8, 255, 0, 255),
        (torch.uint64, 2**64 - 1, 1, 2**64 - 2),
        (torch.bool, True, False, 1),
        (torch.complex64, 3j, 4, 5.0),
        (torch.bfloat16, 1.0, 1.5, 0.5),
        (torch.float8_e4m3fn, 1.0, -1.0, 2.0),
    ],
)
def test_the_largest_difference_is_exact(dtype: torch.dtype, one: complex, other: complex, largest: float) -> None:
    assert compared(torch.tensor([one, one], dtype=dtype), torch.tensor([one, other], dtype=dtype)) == (
        DifferentBits(1, largest)
    )


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_that_can_be_saved_is_compared(name: str) -> None:
    dtype = torch_dtype(name)
    size = 6 * dtype.itemsize
    one = torch.zeros(size, dtype=torch.uint8)
    other = one.clone()
    other[dtype.itemsize * 4] = 1  # a bit of element 4
    assert compared(one.view(dtype).reshape(2, 3), one.clone().view(dtype).reshape(2, 3)) == DifferentBits()
    assert compared(one.view(dtype).reshape(2, 3), other.view(dtype).reshape(2, 3)).count == 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 7), (5,), (5, 4, 3)])
@pytest.mark.parametrize("size", [1, 8, 50, 1 << 20])
def test_pieces_cover_a_tensor_once_in_whole_rows(shape: tuple[int, ...], size: int) -> None:
    tensor = of_tensor(torch.arange(math.prod(shape)).reshape(shape))
    boxes = [*pieces(tensor, size)]
    parts = [torch.as_tensor(tensor.read_part(box)).reshape(-1) for box in boxes]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *parts]), torch.arange(math.prod(shape)))
    row = 8 * math.prod(shape[1:])
    assert all(part.nbytes <= max(size, row) for part in parts)


@given(st.integers(1, 40), st.data())
def test_the_number_of_differing_elements_does_not_depend_on_the_pieces(rows: int, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, rows * 3 - 1)))
    one = torch.ones(rows, 3)
    other = one.clone()
    for place in places:
        other.view(-1)[place] += place + 1
    size = data.draw(st.integers(1, 200))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "__defaults__", (size,))
        found = compared(one, other)
    assert found == DifferentBits(len(places), float(max(places) + 1) if places else 0)


def test_no_more_than_a_piece_of_a_large_tensor_is_read_at_once() -> None:
    read: list[int] = []

    def zeros(box: Box) -> torch.Tensor:
        rows = box[0][1] - box[0][0]
        read.append(rows * 1024 * 4)
        return torch.zeros(rows, 1024)

    large = StoredTensor(torch.float32, (40_000, 1024), zeros)  # 164 MB
    assert different_bits(large, replace(large)) == DifferentBits()
    assert max(read) <= 32 << 20
    assert sum(read) == 2 * large.nbytes
