"""The elements of two tensors that differ in their bits. The tensors are read in pieces, so they need little memory.

The bits decide, not the numbers: 0.0 and -0.0 differ, and a NaN equals a NaN with the same bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.checkpoint import payload
from holdfast.checkpoint.sharding import Box, is_empty
from holdfast.checkpoint.stored_tensor import StoredTensor

PIECE = 32 << 20  # bytes of a tensor that are compared at once, unless a row is larger
Octets = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DifferentBits:
    """The number of elements that differ, and their largest absolute difference: NaN if one of them is NaN."""

    count: int = 0
    largest: int | float = 0

    def __add__(self, other: "DifferentBits") -> "DifferentBits":
        both = self.largest, other.largest
        return DifferentBits(self.count + other.count, math.nan if any(map(math.isnan, both)) else max(both))


def different_bits(one: StoredTensor, other: StoredTensor) -> DifferentBits:
    """Compare two tensors of the same dtype and shape, a piece at a time."""
    total = DifferentBits()
    for box in pieces(one):
        total += _in_piece(_octets(one, box), _octets(other, box), one.dtype)
    return total


def pieces(tensor: StoredTensor, size: int = PIECE) -> Iterator[Box]:
    """Yield boxes of whole rows that together cover a tensor, each of at most `size` bytes or one row."""
    if is_empty(tensor.whole):
        return
    if not tensor.shape:  # a number
        yield ()
        return
    count = tensor.shape[0]
    rows = max(1, size * count // tensor.nbytes)
    for first in range(0, count, rows):
        yield (first, min(first + rows, count)), *tensor.whole[1:]


def _octets(tensor: StoredTensor, box: Box) -> Octets:
    return np.frombuffer(payload.raw(tensor.read_part(box)), np.uint8)


def _in_piece(one: Octets, other: Octets, dtype: torch.dtype) -> DifferentBits:
    size = math.gcd(dtype.itemsize, 8)  # a complex number has several words
    words = (octets.view(f"u{size}").reshape(-1, dtype.itemsize // size) for octets in (one, other))
    differs = np.not_equal(*words).any(axis=1)
    if not (count := int(differs.sum())):
        return DifferentBits()
    a, b = (octets.reshape(-1, dtype.itemsize)[differs] for octets in (one, other))
    return DifferentBits(count, _largest(a, b, dtype))


def _largest(one: Octets, other: Octets, dtype: torch.dtype) -> int | float:
    """Return the largest absolute difference of two arrays of elements, each given by its bytes in a row."""
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        values = (torch.from_numpy(octets).reshape(-1).view(dtype).to(wide) for octets in (one, other))
        return float(torch.sub(*values).abs().max())
    code = "u" if dtype == torch.bool or str(dtype).startswith("torch.uint") else "i"
    a, b = (octets.reshape(-1).view(f"{code}{dtype.itemsize}") for octets in (one, other))
    # The difference of two signed integers may need one bit more: it fits into an unsigned one.
    return int((np.maximum(a, b) - np.minimum(a, b)).view(f"u{dtype.itemsize}").max())
