"""Hypothesis strategies for tensors that are divided among ranks, and snapshots that several ranks save."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.sharding import Box, ShardedTensor, Sharding
from holdfast.checkpoint.store import Store

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding]:
    """Any shape, and any division of it: each mesh dimension splits one tensor dimension, in any order, or none."""
    shape, mesh = draw(shapes), draw(meshes)
    mesh_dims = draw(st.permutations(range(len(mesh)))) if shape else []
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1)) if shape else st.none()
    chosen = [(mesh_dim, draw(dims)) for mesh_dim in mesh_dims]
    return shape, Sharding(mesh, tuple((mesh_dim, dim) for mesh_dim, dim in chosen if dim is not None))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, dict[str, ShardedTensor]]:
    """A number of ranks, and a layout whose tensors are divided over meshes of that many ranks."""
    world_size = draw(st.sampled_from([1, 2, 4, 6, 12]))
    layout = {}
    for name in draw(st.lists(st.text("abc/", max_size=5), unique=True, max_size=5)):
        shape, rule = draw(divisions().filter(lambda division: world_size % division[1].world_size == 0))
        mesh = (*rule.mesh, world_size // rule.world_size)
        dtype = draw(st.sampled_from(["F32", "BF16", "I64", "BOOL"]))
        layout[name] = ShardedTensor(dtype, shape, Sharding(mesh, rule.splits))
    return world_size, layout


def boxes_in(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    """Any box, empty or not, in a tensor of `shape`."""
    spans = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple) for size in shape]
    return st.tuples(*spans)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def values_of(layout: Mapping[str, ShardedTensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of random bits that have the layout's shapes and dtypes."""
    generator, tensors = np.random.default_rng(seed), {}
    for name, tensor in layout.items():
        value = payload.empty(tensor.dtype, tensor.shape)
        count = math.prod(tensor.shape) * value.element_size()
        if count:
            bits = generator.integers(0, 2 if tensor.dtype == "BOOL" else 256, count, np.uint8)
            value.view(-1).view(torch.uint8)[:] = torch.from_numpy(bits)
        tensors[name] = value
    return tensors


def write_shards(
    store: Store, step: int, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, ShardedTensor], world_size: int
) -> list[Digest]:
    """Write the shard files of all ranks, and return their digests."""
    shards = []
    for rank in range(world_size):
        boxes = {name: box for name, tensor in layout.items() if (box := tensor.box(rank)) is not None}
        own = {name: tensors[name][index(box)] for name, box in boxes.items()}
        parts = payload.encode(own, digests=True)
        shards.append(snapshot.write_shard(store, step, parts, rank=rank, count=world_size))
    return shards


def save_divided(
    store: Store, step: int, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, ShardedTensor], world_size: int
) -> Manifest:
    """Save a snapshot as `world_size` ranks would, each its own part."""
    shards = write_shards(store, step, tensors, layout, world_size)
    return snapshot.commit(store, snapshot.draft(step, {"step": step}, layout, world=world_size), shards)
