"""The positions of blocks in packed arrays, to extract, replace and add blocks.

Workers and nodes exchange blocks packed as by `Blocks.pack`. Positions are computed once and used in every round. A
packed dict may lack some arrays: a worker may push nothing for companions such as Adam's moments.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Family, Ids
from holdfast.checkpoint.running import packed_blocks
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays

Places: TypeAlias = list[tuple[Family, Ids | slice]]
"""The array rows that some blocks of a layout cover, for each family (array)."""

KEPT = 8  # layouts; a node has one for its blocks, and one for what each worker pushes in each kind of round


class BlockLayout:
    """The positions of the blocks `ids` in packed arrays, which contain only these blocks in ascending order."""

    def __init__(self, blocks: Blocks, ids: Ids) -> None:
        self.ids = np.asarray(ids, np.int64)
        if np.any(np.diff(self.ids) <= 0):
            raise BadInput("blocks are packed in rising order of their numbers, each once: sort them")
        self.blocks = packed_blocks(blocks, self.ids)[0]

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Ids) -> Ids:
        """Return the index of each of the blocks `ids` in this layout, or -1 for a block that is not in it."""
        positions = np.searchsorted(self.ids, ids)
        present = positions < len(self)
        present[present] = self.ids[positions[present]] == np.asarray(ids)[present]
        return np.where(present, positions, -1)

    def places(self, positions: Ids) -> Places:
        """Return the array rows of the blocks at the given indices of this layout; `positions` must be ascending."""
        if np.any(np.diff(positions) <= 0):
            raise BadInput("blocks are asked for in rising order of their numbers, each once: sort them")
        if len(positions) == len(self):
            return [(family, slice(None)) for family in self.blocks.families]
        places: Places = []
        first = 0
        for family in self.blocks.families:
            own = positions[np.searchsorted(positions, first) : np.searchsorted(positions, first + len(family))]
            if len(own):
                places.append((family, slice(None) if family.dim is None else family.rows(own - first)))
            first += len(family)
        return places


class Layouts:
    """A small cache of `BlockLayout` objects, because workers request the same blocks in every iteration."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lately: deque[BlockLayout] = deque(maxlen=KEPT)

    def of(self, ids: Ids) -> BlockLayout:
        """Return the layout of the blocks `ids`, from the cache if possible."""
        for known in self._lately:
            if np.array_equal(known.ids, ids):
                return known
        self._lately.appendleft(BlockLayout(self._blocks, ids))
        return self._lately[0]


def take(values: Arrays, places: Places) -> Arrays:
    """Return a copy of the rows `places` of the arrays in `values`."""
    return {
        name: values[name].copy() if isinstance(rows, slice) else values[name].take(rows, family.dim)
        for family, rows in places
        for name in family.members
        if name in values
    }


def put(values: Arrays, places: Places, part: Arrays) -> None:
    for family, rows in places:
        for name in family.members:
            if name in part:
                values[name][_index(family, rows)] = part[name]


def add(values: Arrays, places: Places, part: Arrays) -> None:
    for family, rows in places:
        for name in family.members:
            if name in part:
                values[name][_index(family, rows)] += part[name]


def room(layout: BlockLayout, like: Arrays) -> Arrays:
    """Return arrays for all blocks of `layout`, with the dtypes of `like`, filled with -0.0 (neutral in a sum)."""
    return {
        name: np.full(_shape(family, like[name].shape), -0.0, like[name].dtype)
        for family in layout.blocks.families
        for name in family.members
        if name in like
    }


def join(layouts: Layouts, parts: Sequence[tuple[Ids, Arrays]]) -> tuple[BlockLayout, Arrays]:
    """Merge packed blocks, and return the layout of the merged blocks and their arrays.

    Each of `parts` has block ids and the arrays of these blocks; no block is in two parts. `layouts` caches layouts."""
    layout = layouts.of(np.sort(np.concatenate([ids for ids, _ in parts] or [np.zeros(0, np.int64)])))
    like = {name: array for _, values in parts for name, array in values.items()}
    values = room(layout, like)
    for ids, part in parts:
        put(values, layout.places(layout.positions(ids)), part)
    return layout, values


def require_fit(layout: BlockLayout, values: Arrays) -> None:
    """Raise BadInput if the arrays in `values` do not have the shapes for the blocks of `layout`."""
    shapes = {name: family for family in layout.blocks.families for name in family.members}
    for name, array in values.items():
        if name not in shapes:
            raise BadInput(f"array {name!r} belongs to none of the {len(layout)} blocks it is sent for")
        family = shapes[name]
        if family.dim is not None and array.shape[family.dim : family.dim + 1] != (int(family.bounds[-1]),):
            raise BadInput(
                f"array {name!r} of shape {array.shape} does not hold the {int(family.bounds[-1])} rows along dimension "
                f"{family.dim} of the {len(layout)} blocks it is sent for"
            )


def _index(family: Family, rows: Ids | slice) -> Any:
    return (...,) if family.dim is None else (slice(None),) * family.dim + (rows,)


def _shape(family: Family, like: tuple[int, ...]) -> tuple[int, ...]:
    if family.dim is None:
        return like
    return (*like[: family.dim], int(family.bounds[-1]), *like[family.dim + 1 :])


class BlockSlices:
    """The positions of the blocks `wanted` in packed arrays, which hold only the blocks `packed`.

    They are computed once and used for many copies."""

    def __init__(self, blocks: Blocks, packed: Ids, wanted: Ids) -> None:
        self.layout = BlockLayout(blocks, packed)
        positions = self.layout.positions(wanted)
        if (positions < 0).any():
            raise BadInput(f"Block {wanted[positions < 0][0]} is not among the {len(packed)} packed blocks.")
        self.everything = len(wanted) == len(packed)
        self.places = self.layout.places(positions)
        self.names = {name for family, _ in self.places for name in family.members}

    def take(self, arrays: Arrays) -> Arrays:
        """Return the blocks of `arrays` that this object selects: a copy, or `arrays` itself if all are selected."""
        return arrays if self.everything else take(arrays, self.places)

    def put(self, values: Arrays, arrays: Arrays) -> None:
        put(arrays, self.places, values)


def together(pieces: Sequence[tuple[BlockSlices, Arrays]], *, summed: bool = False) -> Arrays:
    """Merge packed blocks of several `pieces` into one set of arrays.

    If several pieces contain the same block, its values are added up if `summed`; otherwise the last one counts."""
    if len(pieces) == 1 and pieces[0][0].everything:
        return pieces[0][1]
    whole: Arrays = {}
    for slices, values in pieces:
        missing = {name: value for name, value in values.items() if name not in whole}
        if strange := set(missing) - slices.names:
            raise BadInput(f"Array {min(strange)!r} belongs to none of the blocks that it was pushed for.")
        whole |= room(slices.layout, missing)
        write = add if summed else put
        write(whole, slices.places, values)
    return whole
