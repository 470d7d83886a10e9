"""Where blocks lie in packed arrays, so that parts of them can be taken out, put in and added.

Everything that workers and nodes send each other is packed as `Blocks.pack` packs it. Places are found once and used
in every round. What is packed need not have every array of its blocks: a worker may push nothing for companions.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Family, Ids
from holdfast.checkpoint.packed import packed_blocks
from holdfast.errors import BadInput
from holdfast.workloads.workload import Arrays

Places: TypeAlias = list[tuple[Family, Ids | slice]]
"""For some blocks of a layout the rows that they cover, family by family."""

KEPT = 8  # layouts; a node has one for its blocks, and one for what each worker pushes in each kind of round


class BlockLayout:
    """How some blocks, in rising order, are packed."""

    def __init__(self, blocks: Blocks, ids: Ids) -> None:
        self.ids = np.asarray(ids, np.int64)
        if np.any(np.diff(self.ids) <= 0):
            raise BadInput("blocks are packed in rising order of their numbers, each once: sort them")
        self.blocks = packed_blocks(blocks, self.ids)[0]

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Ids) -> Ids:
        """Where in `ids` of this layout each of these blocks is; -1 for one that is not."""
        found = np.searchsorted(self.ids, ids)
        here = found < len(self)
        here[here] = self.ids[found[here]] == np.asarray(ids)[here]
        return np.where(here, found, -1)

    def places(self, positions: Ids) -> Places:
        """The rows of the blocks at these positions, which rise."""
        if np.any(np.diff(positions) <= 0):
            raise BadInput("blocks are asked for in rising order of their numbers, each once: sort them")
        if len(positions) == len(self):
            return [(family, slice(None)) for family in self.blocks.families]
        places: Places = []
        first = 0
        for family in self.blocks.families:
            mine = positions[np.searchsorted(positions, first) : np.searchsorted(positions, first + len(family))]
            if len(mine):
                places.append((family, slice(None) if family.dim is None else family.rows(mine - first)))
            first += len(family)
        return places


class Layouts:
    """Layouts by their ids; those asked for lately are kept, since workers name the same blocks round after round."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lately: deque[BlockLayout] = deque(maxlen=KEPT)

    def of(self, ids: Ids) -> BlockLayout:
        """How these blocks are packed."""
        for known in self._lately:
            if np.array_equal(known.ids, ids):
                return known
        self._lately.appendleft(BlockLayout(self._blocks, ids))
        return self._lately[0]


def take(values: Arrays, places: Places) -> Arrays:
    """A copy of the blocks at these places."""
    return {
        name: values[name].copy() if isinstance(rows, slice) else values[name].take(rows, family.dim)
        for family, rows in places
        for name in family.members
        if name in values
    }


def put(values: Arrays, places: Places, part: Arrays) -> None:
    """Write packed blocks to these places."""
    for family, rows in places:
        for name in family.members:
            if name in part:
                values[name][_index(family, rows)] = part[name]


def add(values: Arrays, places: Places, part: Arrays) -> None:
    """Add packed blocks to what is at these places."""
    for family, rows in places:
        for name in family.members:
            if name in part:
                values[name][_index(family, rows)] += part[name]


def room(layout: BlockLayout, like: Arrays) -> Arrays:
    """Zeros for all blocks of a layout, with the dtype of arrays that hold some of them."""
    return {
        name: np.zeros(_shape(family, like[name].shape), like[name].dtype)
        for family in layout.blocks.families
        for name in family.members
        if name in like
    }


def join(layouts: Layouts, parts: Sequence[tuple[Ids, Arrays]]) -> tuple[BlockLayout, Arrays]:
    """Packed blocks put together from parts that have no block in common."""
    layout = layouts.of(np.sort(np.concatenate([ids for ids, _ in parts] or [np.zeros(0, np.int64)])))
    like = {name: array for _, values in parts for name, array in values.items()}
    values = room(layout, like)
    for ids, part in parts:
        put(values, layout.places(layout.positions(ids)), part)
    return layout, values


def require_fit(layout: BlockLayout, values: Arrays) -> None:
    """Refuse arrays that are not what these blocks are packed as."""
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
