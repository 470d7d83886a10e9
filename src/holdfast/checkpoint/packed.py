"""Packed blocks as blocks again: how arrays that hold some blocks of a state are themselves divided."""

import numpy as np
import xxhash

from holdfast.blocks.division import Array, Blocks, Family, Ids, State


def packed_blocks(blocks: Blocks, ids: Ids) -> tuple[Blocks, Ids]:
    """The division of what `Blocks.pack` makes of these ids, and the number there of each of them."""
    families, numbers, first, count = [], np.empty(len(ids), np.int64), 0, 0
    for family in blocks.families:
        mine = (first <= ids) & (ids < first + len(family))
        own = ids[mine] - first
        lengths = family.bounds[own + 1] - family.bounds[own]
        numbers[mine] = count + np.arange(len(lengths))
        first, count = first + len(family), count + len(lengths)
        if len(lengths):
            bounds = np.concatenate(([0], np.cumsum(lengths)))
            families.append(Family(family.array, family.dim, bounds, family.row_size, family.companions))
    return Blocks(tuple(families)), numbers


def block_bytes(blocks: Blocks, state: State) -> Ids:
    """How many bytes each block holds, companions counted."""
    parts = [np.zeros(0, np.int64)]
    for family in blocks.families:
        lengths = np.diff(family.bounds)
        row = sum(int(state[name].nbytes) // max(int(family.bounds[-1]), 1) for name in family.members)
        parts.append(lengths * row)
    return np.concatenate(parts)


def empty(blocks: Blocks, name: str, like: Array) -> Array:
    """Room for all blocks of one array, of the kind and dtype of an array that holds some of them."""
    family = next(family for family in blocks.families if name in family.members)
    shape = list(like.shape)
    if family.dim is not None:
        shape[family.dim] = int(family.bounds[-1])
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def fingerprint(blocks: Blocks) -> str:
    """The same for two divisions exactly if they cut the same arrays at the same places."""
    hasher = xxhash.xxh3_128()
    for family in blocks.families:
        hasher.update(repr((family.members, family.dim, family.row_size)).encode())
        hasher.update(np.ascontiguousarray(family.bounds, np.int64).data)
    return str(hasher.hexdigest())
