"""Positions of some blocks in arrays in which other blocks are packed with them: take, put or add them.

Finding the positions takes longer than using them for a few small blocks, so callers that exchange the same blocks in
every iteration keep them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Blocks, Family, Ids
from holdfast.checkpoint.running import packed_blocks
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays


class _Rows(NamedTuple):
    """The rows of some blocks along a dimension of length `length`; None means all."""

    dim: int
    length: int
    rows: Ids | None
    where: Any  # the same as an index for numpy


class BlockSlices:
    """The positions of the blocks `wanted` among the blocks `packed`, which contain them; both rise."""

    def __init__(self, blocks: Blocks, packed: Ids, wanted: Ids) -> None:
        self.everything = len(wanted) == len(packed)
        division, _ = packed_blocks(blocks, packed)
        numbers, first = np.searchsorted(packed, wanted), 0
        if len(strange := np.setdiff1d(wanted, packed)):
            raise BadInput(f"block {strange[0]} is not among the {len(packed)} blocks that are packed")
        self._rows: dict[str, _Rows] = {}
        for family in division.families:
            begin, end = np.searchsorted(numbers, (first, first + len(family)))
            own = numbers[begin:end] - first
            first += len(family)
            if len(own):
                self._rows |= dict.fromkeys(family.members, _rows(family, own))

    def take(self, arrays: Arrays) -> Arrays:
        """Return these blocks alone, packed: a copy, or the arrays themselves if there are no other blocks."""
        if self.everything:
            return arrays
        return {name: _taken(arrays[name], rows) for name, rows in self._rows.items() if name in arrays}

    def put(self, values: Arrays, arrays: Arrays) -> None:
        """Write these blocks, packed, into `arrays`."""
        for name, value in values.items():
            arrays[name][self._rows[name].where] = value

    def add(self, values: Arrays, arrays: Arrays) -> None:
        """Add these blocks, packed, to `arrays`."""
        for name, value in values.items():
            arrays[name][self._rows[name].where] += value

    def room(self, values: Arrays) -> Arrays:
        """Return arrays for all packed blocks, like `values`, to add to."""
        if strange := [name for name in values if name not in self._rows]:
            raise BadInput(f"there is no block of an array {strange[0]!r} among those it was pushed for")
        return {name: _room(value, self._rows[name]) for name, value in values.items()}


def together(pieces: Sequence[tuple[BlockSlices, Arrays]]) -> Arrays:
    """Join blocks from several sources that have no block in common."""
    return _combined(pieces, BlockSlices.put)


def added(pieces: Sequence[tuple[BlockSlices, Arrays]]) -> Arrays:
    """Add up blocks from several sources, in this order; they may have blocks in common."""
    return _combined(pieces, BlockSlices.add)


def _combined(
    pieces: Sequence[tuple[BlockSlices, Arrays]], write: Callable[[BlockSlices, Arrays, Arrays], None]
) -> Arrays:
    if len(pieces) == 1 and pieces[0][0].everything:
        return pieces[0][1]
    whole: Arrays = {}
    for places, values in pieces:
        whole |= places.room({name: value for name, value in values.items() if name not in whole})
        write(places, values, whole)
    return whole


def _rows(family: Family, own: Ids) -> _Rows:
    if family.dim is None:
        return _Rows(0, 1, None, ...)
    length = int(family.bounds[-1])
    if len(own) == len(family):
        return _Rows(family.dim, length, None, ...)
    rows = family.rows(own)
    return _Rows(family.dim, length, rows, (slice(None),) * family.dim + (rows,))


def _taken(array: npt.NDArray[Any], rows: _Rows) -> npt.NDArray[Any]:
    return array if rows.rows is None else array.take(rows.rows, axis=rows.dim)


def _room(like: npt.NDArray[Any], rows: _Rows) -> npt.NDArray[Any]:
    shape = list(like.shape)
    if rows.rows is not None:
        shape[rows.dim] = rows.length
    return np.full(shape, -0.0, like.dtype)  # minus 0: whatever is added to it keeps every bit, 0 its sign too
