"""Where some blocks lie in arrays in which others are packed with them: to take them out, put them in, or add to them.

Finding the places takes longer than using them for a few small blocks, so whoever exchanges the same blocks in every
iteration keeps them.
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
    """The rows of some blocks along a dimension of an array, which has `length` of them; None: all there are."""

    dim: int
    length: int
    rows: Ids | None
    where: Any  # the same as an index for numpy


class BlockSlices:
    """The places of the blocks `wanted` among the blocks `packed`, which contain them; both rise."""

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
        """These blocks alone, packed: a copy, or the arrays themselves where there are no other blocks."""
        if self.everything:
            return arrays
        return {name: _taken(arrays[name], rows) for name, rows in self._rows.items() if name in arrays}

    def put(self, values: Arrays, arrays: Arrays) -> None:
        """Write these blocks, packed, into the arrays."""
        for name, value in values.items():
            arrays[name][self._rows[name].where] = value

    def add(self, values: Arrays, arrays: Arrays) -> None:
        """Add these blocks, packed, to the arrays."""
        for name, value in values.items():
            arrays[name][self._rows[name].where] += value

    def room(self, values: Arrays) -> Arrays:
        """Room for all blocks that are packed, in arrays of the kind that hold these blocks, to add to."""
        if strange := [name for name in values if name not in self._rows]:
            raise BadInput(f"there is no block of an array {strange[0]!r} among those it was pushed for")
        return {name: _room(value, self._rows[name]) for name, value in values.items()}


def together(pieces: Sequence[tuple[BlockSlices, Arrays]]) -> Arrays:
    """Blocks from several sides, each of which has others, as one."""
    return _combined(pieces, BlockSlices.put)


def added(pieces: Sequence[tuple[BlockSlices, Arrays]]) -> Arrays:
    """Blocks from several sides, which may have the same ones, as one: added up in this order."""
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
