"""The part of the protected state that belongs to this rank, in a save and in a restore.

A DTensor, such as a parameter under FSDP2, is divided among the ranks by its placements. With tensor parallelism, one
that is only sharded by FSDP has the same values on all ranks of a tensor-parallel group, which divide it further. A
tensor that every rank holds with the same values, such as a parameter under DDP, is divided evenly, so that each rank
saves a part of it. Any other tensor is saved by rank 0.
"""

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from holdfast.blocks.division import Array
from holdfast.checkpoint import payload, sharding
from holdfast.checkpoint.payload import FlatState
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.sharding import Box, Shape, ShardedTensor, Sharding
from holdfast.checkpoint.stored_tensor import StoredTensor, of_snapshot
from holdfast.errors import BadInput

T = TypeVar("T", bound=Array)


def is_dtensor(value: object) -> "TypeGuard[Any]":
    """Return True if `value` is a tensor that is distributed over a device mesh."""
    # A DTensor exists only after this import, which is slow.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_sharded(model: nn.Module) -> bool:
    """Return True if parameters of `model` are distributed over the ranks, as with FSDP2."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def local(value: T) -> T:
    """Return the values that this rank holds: its shard if the tensor is distributed, else the whole tensor."""
    return value.to_local() if is_dtensor(value) else value


def address(tensor: torch.Tensor) -> int | None:
    """Return the memory address of the values that this rank holds, or None if it holds none."""
    held = local(tensor.detach())  # a DTensor itself has the address 0
    return held.data_ptr() if held.numel() else None


@dataclass(frozen=True, slots=True, eq=False)
class DividedState:
    """A flattened state, the layout that divides its tensors among the ranks, and the parts that this rank saves."""

    flat: FlatState
    layout: dict[str, ShardedTensor]
    parts: dict[str, Array]


def divide(
    flat: FlatState, shared: Collection[str], rank: int, world_size: int, tensor_parallel: int = 1
) -> DividedState:
    """Divide a state among the ranks; `shared` are the names of the tensors that have the same values on every rank.

    Groups of `tensor_parallel` consecutive ranks train the same samples."""
    with torch.no_grad():  # with autograd, each to_local takes 15 times as long
        layout = _layout(flat.tensors, shared, rank, world_size, tensor_parallel)
        return DividedState(flat, layout, _own_parts(flat.tensors, layout, rank))


def _layout(
    tensors: Mapping[str, Array], shared: Collection[str], rank: int, world_size: int, tensor_parallel: int
) -> dict[str, ShardedTensor]:
    layout = {}
    for name, value in tensors.items():
        if is_dtensor(value):
            mesh = _full_mesh(name, value, rank, world_size, tensor_parallel)
            rule = _of_dtensor(name, value, mesh, rank)
        elif name in shared and value.ndim and world_size > 1:
            rule = Sharding((world_size,), ((0, 0),))
        else:
            rule = Sharding((world_size,))
        layout[name] = ShardedTensor(payload.dtype_name(name, local(value)), tuple(value.shape), rule)
    return layout


def _own_parts(tensors: Mapping[str, Array], layout: Mapping[str, ShardedTensor], rank: int) -> dict[str, Array]:
    parts = {}
    for name, value in tensors.items():
        box = layout[name].box(rank)
        if box is not None:
            held = held_box(value, rank)
            parts[name] = local(value)[sharding.within(box, held)] if box != held else local(value)
    return parts


def held_box(value: Array, rank: int) -> Box:
    """Return the part of a tensor that this rank holds in memory: its shard, or the whole tensor."""
    if not is_dtensor(value):
        return tuple((0, size) for size in value.shape)
    mesh = value.device_mesh
    index = _place_in(mesh, rank)
    return Sharding(tuple(mesh.shape), _splits(value)).held_box(tuple(value.shape), index)


# With thousands of ranks it takes long to list those of a mesh, and every tensor asks for them: hence the caches.
@functools.lru_cache(maxsize=16)
def _place_in(mesh: Any, rank: int) -> int:
    """Return the index of `rank` among the ranks of a device mesh."""
    return int(mesh.mesh.flatten().tolist().index(rank))


@functools.lru_cache(maxsize=16)
def _shape_with_all_ranks(mesh: Any, rank: int, world_size: int, tensor_parallel: int) -> Shape | None:
    """Return the shape of the mesh of all ranks whose first dimensions are those of `mesh`; None if there is none.

    `mesh` lacks the dimension of tensor parallelism if only FSDP has sharded a tensor."""
    ranks, shape = mesh.mesh.flatten().tolist(), tuple(mesh.shape)
    if ranks == list(range(world_size)):
        return shape
    if ranks == list(range(rank % tensor_parallel, world_size, tensor_parallel)):
        return (*shape, tensor_parallel)
    return None


def _full_mesh(name: str, value: Any, rank: int, world_size: int, tensor_parallel: int) -> Shape:
    shape = _shape_with_all_ranks(value.device_mesh, rank, world_size, tensor_parallel)
    if shape is None:
        raise BadInput(
            f"{name} is distributed over ranks {value.device_mesh.mesh.flatten().tolist()}, and the run has ranks 0 to "
            f"{world_size - 1}: shard it over run.mesh, the dimension `shard` of run.device_mesh, or a mesh of all ranks in "
            "their order."
        )
    return shape


def _of_dtensor(name: str, value: Any, mesh: Shape, rank: int) -> Sharding:
    splits = _splits(value)
    divided = {mesh_dim for mesh_dim, _ in splits}
    replicas = tuple((mesh_dim, 0) for mesh_dim in range(len(mesh)) if mesh_dim not in divided and value.ndim)
    _check(name, value, rank)
    return Sharding(mesh, (*splits, *replicas))


def _splits(value: Any) -> tuple[tuple[int, int], ...]:
    """Return the splits of a DTensor, as (mesh dimension, tensor dimension), in the order in which they are applied.

    Strided shards come last: FSDP makes them from tensors that tensor parallelism has already sharded."""
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(value.placements):
        if placement.is_shard() or hasattr(placement, "split_factor"):
            (strided if hasattr(placement, "split_factor") else plain).append((mesh_dim, int(placement.dim)))
    return (*plain, *strided)


def _check(name: str, value: Any, rank: int) -> None:
    """Raise BadInput if torch divides the tensor in another way than `held_box`, the division that would be saved."""
    if any(placement.is_partial() for placement in value.placements):
        raise BadInput(f"{name} has partial sums on each rank ({value.placements}): reduce it before it is protected.")
    box = held_box(value, rank)
    shape = tuple(value.to_local().shape)
    if shape != sharding.sizes(box) and not (sharding.is_empty(box) and 0 in shape):
        raise BadInput(
            f"{name} is divided in a way that holdfast cannot save ({value.placements} on a mesh of {tuple(value.device_mesh.shape)}, "
            f"{shape} here): use an even division."
        )


def read_parts(
    reader: SnapshotReader, held: Mapping[str, Array], parameter_of: Callable[[str], Any], rank: int
) -> dict[str, Array]:
    """Read the tensors of a snapshot as `rank`, this rank, needs them: its shard of each distributed tensor.

    `held` are the present tensors by name. A distributed tensor with the saved shape and dtype is overwritten, so that
    no second copy is in memory. `parameter_of` returns the parameter for the name of an optimizer state. If that state
    does not exist yet, it is distributed like the parameter."""
    tensors: dict[str, Array] = {}
    for name in reader.in_file_order():
        tensors[name] = read_as_held(of_snapshot(reader, name), held.get(name), parameter_of(name), rank)
    return tensors


def read_as_held(stored: StoredTensor, target: Any, parameter: Any, rank: int) -> Any:
    """Return a stored tensor as this rank needs it: as a distributed tensor if possible, otherwise whole.

    `target` is the present tensor of that name. If it is distributed, with the stored shape and dtype, it is overwritten
    and returned. Otherwise the result is distributed like `parameter`, if that has the stored shape."""
    if _has_shape(target, stored) and local(target).dtype == stored.dtype:
        with torch.no_grad():
            local(target).copy_(torch.as_tensor(stored.read_part(held_box(target, rank))))
        return target
    if (target is None or is_dtensor(target)) and _has_shape(parameter, stored):
        part = torch.as_tensor(stored.read_part(held_box(parameter, rank)))
        is_all = part.nbytes == part.untyped_storage().nbytes()
        return like(parameter, part if is_all else part.clone())  # else it keeps the rest in memory
    return stored.read()


def _has_shape(value: object, stored: StoredTensor) -> "TypeGuard[Any]":
    return is_dtensor(value) and tuple(value.shape) == stored.shape


def like(parameter: Any, values: torch.Tensor) -> Any:
    """Return `values`, this rank's part of a tensor, as a DTensor that is distributed like `parameter`."""
    return type(parameter.detach()).from_local(
        values.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
