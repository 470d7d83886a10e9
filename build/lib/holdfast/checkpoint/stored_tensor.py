"""Tensors in files, known by their dtype and shape. Their values are read when they are needed, whole or in part."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast import memory
from holdfast.blocks.division import Array
from holdfast.checkpoint import payload
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.sharding import Box, within

DEEPEST = 4  # levels of containers that are searched for tensors


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor in a file. `read_part` returns the values in a box (a range of indices in each dimension).

    Reading many tensors is fastest in the order of their `position`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read_part: Callable[[Box], Array]
    position: int = 0

    @property
    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self) -> Array:
        """Return the whole tensor."""
        return self.read_part(self.whole)

    def stand_in(self) -> torch.Tensor:
        """Return a tensor of this dtype and shape that needs almost no memory: all elements share one value."""
        return torch.empty((), dtype=self.dtype).expand(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.read(), dtype)


def of_snapshot(reader: SnapshotReader, name: str, position: int = 0) -> StoredTensor:
    """Return the tensor `name` of a snapshot as a `StoredTensor`; its values are read later."""
    tensor = reader.layout[name]
    return StoredTensor(payload.torch_dtype(tensor.dtype), tensor.shape, partial(reader.read, name), position)


def of_tensor(tensor: torch.Tensor) -> StoredTensor:
    """Return a tensor in memory as a `StoredTensor`, so that it can be used like a tensor in a file."""
    whole = tuple((0, size) for size in tensor.shape)
    return StoredTensor(tensor.dtype, tuple(tensor.shape), lambda box: tensor.detach()[within(box, whole)])


def map_leaves(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of the nested dicts, lists and tuples in `tree`, with each leaf replaced by `change(path, leaf)`.

    The path of a leaf is made of the keys that lead to it, such as "state/0/exp_avg". `path` is the path of `tree`
    itself."""

    def inside(key: object, item: Any) -> Any:
        return map_leaves(item, change, f"{path}/{key}" if path else str(key))

    if isinstance(tree, Mapping):
        mapped = type(tree)({key: inside(key, item) for key, item in tree.items()})  # type: ignore[call-arg]
        if hasattr(tree, "__dict__"):  # the versions of a module's layers
            vars(mapped).update(vars(tree))
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(inside(number, item) for number, item in enumerate(tree))
    return change(path, tree)


def read_all(tree: Any) -> Any:
    """Return a nested state in which every stored tensor is replaced by its values."""
    leaves: list[StoredTensor] = []

    def collect(_: str, value: Any) -> None:
        if isinstance(value, StoredTensor):
            leaves.append(value)

    map_leaves(tree, collect)
    memory.require("the state", sum(leaf.nbytes for leaf in leaves))
    values = {id(leaf): leaf.read() for leaf in sorted(leaves, key=lambda leaf: leaf.position)}
    return map_leaves(tree, lambda _, value: values.pop(id(value), value) if isinstance(value, StoredTensor) else value)


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (path, tensor) for every stored tensor in the nested dicts `value`, with paths such as "model/weight".

    If `value` is part of an outer dict, `path` and `depth` say where. Dicts more than `DEEPEST` levels deep are not
    searched."""
    if isinstance(value, StoredTensor):
        yield path, value
    elif isinstance(value, Mapping) and depth < DEEPEST:
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key}" if path else str(key), depth + 1)
