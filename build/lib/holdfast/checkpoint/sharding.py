"""Division of a training state among ranks: the part of each tensor that each rank saves.

The division follows from the shapes of the tensors and the device mesh alone. So every rank knows the parts of all
ranks, and nothing is gathered before a save.

A tensor on a mesh is divided by splits, one after another. A split cuts the remaining part along one tensor dimension
into equal chunks, as `torch.chunk` does: one chunk for each coordinate of one mesh dimension. FSDP has one split.
Replicas, which all hold the same values, are split too: each replica saves a part of the rows.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.checkpoint.digest import is_count
from holdfast.checkpoint.payload import DIMENSIONS, DTYPES
from holdfast.errors import Corrupt

Shape: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[tuple[int, int], ...]
"""A rectangular part of a tensor: the first index and the index after the last one, in each dimension."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """A rule that divides a tensor among the ranks of a device mesh.

    `mesh` has the size of each mesh dimension; ranks are numbered in row-major order. `splits` are pairs of a mesh
    dimension and a tensor dimension, and are applied in this order. Along a mesh dimension that has no split, only the
    ranks with coordinate 0 save the tensor."""

    mesh: tuple[int, ...]
    splits: tuple[tuple[int, int], ...] = ()

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    def box(self, shape: Shape, rank: int) -> Box:
        """Return the part of a tensor of `shape` that `rank` saves. It may be empty."""
        at = self._coordinates(rank)
        divided = {mesh_dim for mesh_dim, _ in self.splits}
        if any(coordinate for mesh_dim, coordinate in enumerate(at) if mesh_dim not in divided):
            return tuple((0, 0) for _ in shape) or ((0, 0),)
        return self.held_box(shape, rank)

    def held_box(self, shape: Shape, rank: int) -> Box:
        """Return the part of a tensor of `shape` that `rank` holds after all splits, even if another rank saves it."""
        at = self._coordinates(rank)
        box = [(0, size) for size in shape]
        for mesh_dim, dim in self.splits:
            box[dim] = _chunk(box[dim], self.mesh[mesh_dim], at[mesh_dim])
        return tuple(box)

    def parts(self, wanted: Box, shape: Shape) -> Iterator[tuple[int, Box]]:
        """Yield (rank, box that this rank saves) for every rank whose box overlaps the box `wanted`.

        `shape` is the shape of the whole tensor. The time grows with the number of results, not with the number of
        ranks."""
        if is_empty(wanted):
            return
        yield from self._parts(wanted, [(0, size) for size in shape], [0] * len(self.mesh), 0)

    def _parts(self, wanted: Box, box: list[tuple[int, int]], at: list[int], number: int) -> Iterator[tuple[int, Box]]:
        if number == len(self.splits):
            yield self._rank(at), tuple(box)
            return
        mesh_dim, dim = self.splits[number]
        start, stop = box[dim]
        size = _ceil(stop - start, self.mesh[mesh_dim])
        first, last = max(wanted[dim][0], start), min(wanted[dim][1], stop)
        for coordinate in range((first - start) // size, (last - 1 - start) // size + 1) if first < last else ():
            at[mesh_dim], box[dim] = coordinate, _chunk((start, stop), self.mesh[mesh_dim], coordinate)
            yield from self._parts(wanted, box, at, number + 1)
        at[mesh_dim], box[dim] = 0, (start, stop)

    def _coordinates(self, rank: int) -> list[int]:
        at = []
        for size in reversed(self.mesh):
            rank, coordinate = divmod(rank, size)
            at.append(coordinate)
        return at[::-1]

    def _rank(self, at: list[int]) -> int:
        rank = 0
        for size, coordinate in zip(self.mesh, at, strict=True):
            rank = rank * size + coordinate
        return rank


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """The dtype (in safetensors' names) and shape of a whole tensor, and the rule that divides it among the ranks."""

    dtype: str
    shape: Shape
    sharding: Sharding

    def box(self, rank: int) -> Box | None:
        """Return the part that `rank` saves, or None if it saves nothing. Rank 0 saves tensors that have no values."""
        if is_empty(self.whole):
            return None if rank else self.whole
        box = self.sharding.box(self.shape, rank)
        return None if is_empty(box) else box

    def parts(self, wanted: Box) -> list[tuple[int, Box]]:
        """Return (rank, box that this rank saves) for every rank whose box overlaps the box `wanted`."""
        return [(0, self.whole)] if is_empty(self.whole) else list(self.sharding.parts(wanted, self.shape))

    @property
    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)


StateLayout: TypeAlias = Mapping[str, ShardedTensor]
"""The tensors of a state by name, and how each is divided among the ranks."""


def is_empty(box: Box) -> bool:
    return any(start >= stop for start, stop in box)


def sizes(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box:
    """Return the part that two boxes of one tensor have in common."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `box` from a tensor with the values of the larger box `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def to_json(layout: StateLayout) -> dict[str, Any]:
    """Return the layout as JSON values; each device mesh is written only once."""
    meshes = list(dict.fromkeys(tensor.sharding.mesh for tensor in layout.values()))
    return {
        "meshes": [list(mesh) for mesh in meshes],
        "tensors": {
            name: [tensor.dtype, list(tensor.shape), meshes.index(tensor.sharding.mesh), _splits(tensor)]
            for name, tensor in layout.items()
        },
    }


def from_json(value: Any, world_size: int) -> dict[str, ShardedTensor]:
    """Return the layout that `to_json` encoded; raise Corrupt if `value` is not a layout for `world_size` ranks."""
    try:
        meshes = [tuple(mesh) for mesh in value["meshes"]]
        if not all(is_count(size) for mesh in meshes for size in mesh):
            raise ValueError("a mesh has sizes")
        if any(len(mesh) > DIMENSIONS for mesh in meshes):
            raise ValueError(f"a mesh has more than {DIMENSIONS} dimensions")
        if other := [mesh for mesh in meshes if math.prod(mesh) != world_size]:
            raise Corrupt(
                f"its tensors are divided among {math.prod(other[0])} ranks, but the manifest lists the files of {world_size}: "
                "fall back to an older snapshot."
            )
        return {name: _tensor(meshes, *entry) for name, entry in value["tensors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Corrupt(f"the snapshot does not say how its tensors are divided ({error!r:.200}).") from error


def _splits(tensor: ShardedTensor) -> list[list[int]]:
    return [list(split) for split in tensor.sharding.splits]


def _tensor(meshes: list[tuple[int, ...]], dtype: str, shape: list[int], mesh: int, splits: Any) -> ShardedTensor:
    if not (dtype in DTYPES and is_count(mesh) and all(map(is_count, shape))):
        raise ValueError("a tensor has a dtype, a shape and a mesh")
    pairs = tuple((mesh_dim, dim) for mesh_dim, dim in splits)
    mesh_dims = [mesh_dim for mesh_dim, _ in pairs]
    if not all(is_count(m) and m < len(meshes[mesh]) and is_count(dim) and dim < len(shape) for m, dim in pairs):
        raise ValueError(f"splits {splits} do not fit the shape {shape}")
    if len(set(mesh_dims)) < len(mesh_dims):
        raise ValueError(f"splits {splits} use a mesh dimension twice")
    return ShardedTensor(dtype, tuple(shape), Sharding(meshes[mesh], pairs))


def _chunk(span: tuple[int, int], count: int, index: int) -> tuple[int, int]:
    start, stop = span
    size = _ceil(stop - start, count)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def _ceil(size: int, count: int) -> int:
    return -(-size // count)  # exact, unlike a division of floats
