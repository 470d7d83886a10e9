"""The positions of blocks in packed arrays, to extract, replace and add blocks.

Workers and nodes exchange blocks packed as by `Blocks.pack`. Positions are computed once and used in every round. A
packed dict may lack some arrays: a worker may push nothing for companions such as Adam's moments.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Family, Ids
from holdfast.checkpoint.running import packed_blocks
from holdfast.errors import BadInput
from holdfast.workloads.divided import Push
from holdfast.workloads.workload import Arrays

Places: TypeAlias = list[tuple[Family, Ids | slice]]
"""The array rows that some blocks of a layout cover, for each family (array)."""

KEPT = 8  # layouts; a node has one for its blocks, and one for what each worker pushes in each kind of round


class BlockLayout:
    """The positions of the blocks `ids` in packed arrays, which hold only these blocks, in ascending order."""

    def __init__(self, blocks: Blocks, ids: Ids) -> None:
        self.ids = np.asarray(ids, np.int64)
        if np.any(np.diff(self.ids) <= 0):
            raise BadInput("blocks are packed in rising order of their numbers, each once: sort them")
        self.blocks = packed_blocks(blocks, self.ids)[0]

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Ids) -> Ids:
        """Return the index of each of the blocks `ids` in this layout, or -1 for a block that is not in the layout."""
        positions = np.searchsorted(self.ids, ids)
        present = positions < len(self)
        present[present] = self.ids[positions[present]] == np.asarray(ids)[present]
        return np.where(present, positions, -1)

    def places(self, positions: Ids) -> Places:
        """Return the array rows of the blocks at the indices `positions` (ascending) of this layout."""
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
    """A small cache of `BlockLayout` objects by the ids of their blocks."""

    def __init__(self, blocks: Blocks) -> None:
        self._of = lru_cache(KEPT)(lambda ids: BlockLayout(blocks, np.frombuffer(ids, np.int64)))

    def of(self, ids: Ids) -> BlockLayout:
        return self._of(np.asarray(ids, np.int64).tobytes())


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


def merged(layout: BlockLayout, pieces: Sequence[tuple[Places, Arrays]]) -> Arrays:
    """Combine `pieces` (array rows and their values) into packed arrays for all blocks of `layout`."""
    if len(pieces) == 1:
        return pieces[0][1]
    values = _room(layout, [part for _, part in pieces])
    for places, part in pieces:
        put(values, places, part)
    return values


def summed(layouts: Layouts, ids: Ids, pushes: Sequence[Push]) -> Arrays:
    """Sum the workers' updates `pushes` and return the sums of the blocks `ids` in packed arrays."""
    layout = layouts.of(ids)
    total = _room(layout, [push.values for push in pushes])
    for push in pushes:
        positions = layout.positions(push.ids)
        wanted = positions >= 0
        part = push.values
        if not wanted.all():
            part = take(part, layouts.of(push.ids).places(np.flatnonzero(wanted)))
        for family, rows in layout.places(positions[wanted]):
            for name in family.members:
                if name in part:
                    total[name][_index(family, rows)] += part[name]
    return total


def require_fit(layout: BlockLayout, values: Arrays) -> None:
    """Raise BadInput if the shapes of the arrays `values` do not fit the blocks of `layout`."""
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


def _room(layout: BlockLayout, parts: Sequence[Arrays]) -> Arrays:
    """Return new arrays for all blocks of `layout`, with the dtypes of `parts`, filled with -0.0 (neutral in a sum)."""
    like = {name: array for part in parts for name, array in part.items()}
    room = {}
    for family in layout.blocks.families:
        for name in family.members:
            if name in like:
                shape = list(like[name].shape)
                if family.dim is not None:
                    shape[family.dim] = int(family.bounds[-1])
                room[name] = np.full(shape, -0.0, like[name].dtype)
    return room
