"""Divide a state into blocks: parts that are lost, saved and restored as a whole.

A state is a dict of named numpy arrays or torch tensors. `Blocks` numbers its blocks 0..n-1, and every other part of
the package refers to blocks by these numbers. This module knows nothing of steps, failures or storage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.errors import BadInput

if TYPE_CHECKING:
    import torch  # for types only: simulations need numpy alone, and importing torch takes seconds

Array: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
State: TypeAlias = Mapping[str, Array]
Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The blocks cut from one array: block i is the slice `bounds[i]:bounds[i+1]` along `dim`.

    If `dim` is None, the whole array is one block. `row_size` is the number of elements at one index of `dim`.
    `companions` are arrays that are cut in the same way and belong to the same blocks, such as Adam's moments."""

    array: str
    dim: int | None
    bounds: Ids
    row_size: int
    companions: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def members(self) -> tuple[str, ...]:
        return (self.array, *self.companions)

    def rows(self, ids: Ids) -> Ids:
        """Return the positions along `dim` that the blocks `ids` cover, concatenated in the order of `ids`."""
        starts = self.bounds[ids]
        lengths = self.bounds[ids + 1] - starts
        if np.all(lengths == 1):
            return starts
        skipped = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        return np.repeat(starts - skipped, lengths) + np.arange(lengths.sum())


def whole(
    state: State, arrays: Sequence[str] | None = None, *, companions: Mapping[str, Sequence[str]] | None = None
) -> "Blocks":
    """Divide a state into blocks: each array is one block.

    `state` is a dict of arrays or tensors. If `arrays` is given, only the arrays of these names become blocks.
    `companions` maps the name of an array to the names of further arrays that belong to its block, such as the moments
    of Adam."""
    companions = companions or {}
    attached = {name for names in companions.values() for name in names}
    chosen = [name for name in state if name not in attached] if arrays is None else list(arrays)
    families = []
    for name in chosen:
        size = _size(_get(state, name))
        families.append(Family(name, None, np.array([0, 1]), size, tuple(companions.get(name, ()))))
    return Blocks(tuple(families))._checked(state)


def along(state: State, array: str, *, dim: int = 0, size: int = 1, companions: Sequence[str] = ()) -> "Blocks":
    """Divide one array of a state into blocks of `size` consecutive positions along the dimension `dim`.

    `array` is the name of the array in the dict `state`. The arrays `companions`, such as the moments of Adam, are
    divided in the same way, and their parts belong to the same blocks."""
    shape = _get(state, array).shape
    if not -len(shape) <= dim < len(shape):
        raise BadInput(f"array {array!r} has {len(shape)} dimensions, so it cannot be cut along dimension {dim}.")
    if size < 1:
        raise BadInput(f"size must be at least 1 (got {size}).")
    length = shape[dim]
    return ragged(state, array, np.append(np.arange(0, length, size), length), dim=dim, companions=companions)


def ragged(
    state: State, array: str, bounds: Sequence[int] | Ids, *, dim: int = 0, companions: Sequence[str] = ()
) -> "Blocks":
    """Divide one array of a state into blocks of unequal length along the dimension `dim`.

    Block i is the slice `bounds[i]:bounds[i+1]` of `array`. The arrays `companions`, such as the moments of Adam, are
    divided in the same way, and their slices belong to the same blocks."""
    value = _get(state, array)
    dim = dim % len(value.shape)
    cuts = np.asarray(bounds, dtype=np.int64)
    if len(cuts) < 1 or cuts[0] != 0 or cuts[-1] != value.shape[dim] or np.any(np.diff(cuts) < 0):
        length = f"its length {value.shape[dim]} along dimension {dim}"
        raise BadInput(f"bounds of array {array!r} must rise from 0 to {length}.")
    row_size = _size(value) // max(value.shape[dim], 1)
    return Blocks((Family(array, dim, cuts, row_size, tuple(companions)),))._checked(state)


def by_row(state: State) -> "Blocks":
    """Divide a state into blocks: each row of each array is one block. An array without dimensions is one block."""
    return reduce(add, (along(state, name) if state[name].ndim else whole(state, [name]) for name in state))


class Blocks:
    """A division of a state into numbered blocks. `a + b` is the division with the blocks of `a`, then those of `b`."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self.families = families
        self._starts = np.cumsum([0, *(len(family) for family in families)])
        members = [name for family in families for name in family.members]
        if len(set(members)) != len(members):
            twice = sorted({name for name in members if members.count(name) > 1})
            raise BadInput(f"every array belongs to one family of blocks, but {', '.join(twice)} would belong to two")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(self.families + other.families)

    @property
    def sizes(self) -> Ids:
        """The number of elements of each block, without companion arrays such as Adam's moments."""
        return np.concatenate([np.diff(f.bounds) * f.row_size for f in self.families] or [np.zeros(0, np.int64)])

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all divided arrays, including companion arrays such as Adam's moments."""
        return tuple(name for family in self.families for name in family.members)

    def name(self, block: int) -> str:
        """Return a readable name of a block, such as `weight[17]`, or `bias` if the block is a whole array."""
        which = int(np.searchsorted(self._starts, block, side="right")) - 1
        family = self.families[which]
        return family.array if family.dim is None else f"{family.array}[{block - int(self._starts[which])}]"

    def pack(self, state: State, ids: Ids) -> dict[str, Array]:
        """Return a copy of the blocks with the numbers `ids`: for each array the values of these blocks, in this order."""
        return {name: _take(state[name], family, rows) for family, rows in self._split(ids) for name in family.members}

    def unpack(self, packed: State, ids: Ids, target: State) -> None:
        """Write the blocks that `pack` returned for the same `ids` into the arrays of `target`, in place."""
        for family, rows in self._split(ids):
            for name in family.members:
                _put(target[name], family, rows, packed[name])

    def copy(self, source: State, target: State, ids: Ids) -> None:
        """Copy the blocks with the numbers `ids` from `source` to `target`, in place. The other blocks stay unchanged."""
        self.unpack(self.pack(source, ids), ids, target)

    def _split(self, ids: Ids) -> list[tuple[Family, Ids]]:
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self)):
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise BadInput(f"block {wrong} does not exist: there are {len(self)}, numbered from 0.")
        owner = np.searchsorted(self._starts, ids, side="right") - 1
        return [(self.families[i], self.families[i].rows(ids[owner == i] - self._starts[i])) for i in np.unique(owner)]

    def _checked(self, state: State) -> "Blocks":
        for family in self.families:
            lengths = [_get(state, n).shape[family.dim] for n in family.members] if family.dim is not None else []
            if len(set(lengths)) > 1:
                raise BadInput(f"companions of {family.array!r} must be as long as it is along dimension {family.dim}")
        return self


Norm: TypeAlias = Callable[[Blocks, State, State], Floats]
"""A function that returns for each block how far apart its values are in two states.

A workload may define its own norm; the default is `euclidean`."""


def euclidean(blocks: Blocks, a: State, b: State) -> Floats:
    """Return for each block the Euclidean distance between its values in `a` and in `b`, without companion arrays."""
    distances: list[Floats] = []
    for family in blocks.families:
        square = (_numpy(a[family.array]).astype(np.float64) - _numpy(b[family.array]).astype(np.float64)) ** 2
        if family.dim is None:
            distances.append(np.array([np.sqrt(square.sum())]))
            continue
        rows = square.sum(axis=tuple(d for d in range(square.ndim) if d != family.dim))
        filled = np.diff(family.bounds) > 0  # an empty block has not moved, but reduceat would return a wrong sum
        sums = np.zeros(len(family))
        if filled.any():
            sums[filled] = np.add.reduceat(rows, family.bounds[:-1][filled])
        distances.append(np.sqrt(sums))
    return np.concatenate(distances)


def partition(count: int, nodes: int, rng: np.random.Generator) -> Ids:
    """Return for each of `count` blocks the number of its node, chosen at random from 0 to `nodes - 1`.

    The numbers of blocks of two nodes differ by at most one."""
    if nodes < 1:
        raise BadInput(f"nodes must be at least 1 (got {nodes}).")
    return rng.permutation(np.arange(count) % nodes)


def _take(value: Array, family: Family, rows: Ids) -> Array:
    if isinstance(value, np.ndarray):
        return value.copy() if family.dim is None else value.take(rows, axis=family.dim)
    return value.clone() if family.dim is None else value.index_select(family.dim, _positions(value, rows))


def _put(target: Array, family: Family, rows: Ids, packed: Array) -> None:
    if isinstance(target, np.ndarray):
        where = ... if family.dim is None else (slice(None),) * family.dim + (rows,)
        target[where] = _numpy(packed)
        return
    source = target.new_tensor(packed) if isinstance(packed, np.ndarray) else packed.to(target)
    if family.dim is None:
        target.detach().copy_(source)
    else:
        target.detach().index_copy_(family.dim, _positions(target, rows), source)


def _positions(value: "torch.Tensor", rows: Ids) -> "torch.Tensor":
    import torch

    return torch.from_numpy(rows).to(value.device)


def _numpy(value: Array) -> npt.NDArray[Any]:
    return value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()


def _size(value: Array) -> int:
    return int(value.size) if isinstance(value, np.ndarray) else value.numel()


def _get(state: State, name: str) -> Array:
    if name not in state:
        raise BadInput(f"the state has no array {name!r}; it has {', '.join(state) or 'none'}")
    return state[name]
