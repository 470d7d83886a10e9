"""The comparison of two nested states: the tensors and the plain values that differ, or that only one state has."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.compare.leaves import Leaf, LeafPath, leaves
from holdfast.compare.tensor_bits import DifferentBits, different_bits


@dataclass(frozen=True, slots=True, eq=False)
class ChangedTensor:
    """A tensor that differs between two states. `bits` is None if its dtype or shape differs."""

    one: Leaf
    other: Leaf
    bits: DifferentBits | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StateComparison:
    """The differences between two states, and the size of the first one."""

    tensors: int
    bytes: int
    values: int
    changed_tensors: tuple[ChangedTensor, ...]
    changed_values: tuple[tuple[Leaf, Leaf], ...]
    only_one: tuple[Leaf, ...]
    only_other: tuple[Leaf, ...]

    @property
    def is_equal(self) -> bool:
        return not self.names

    @property
    def names(self) -> list[str]:
        """The names of all tensors and values that differ, or that only one state has."""
        pairs = [*((changed.one, changed.other) for changed in self.changed_tensors), *self.changed_values]
        return [leaf.name for leaf in (*(one for one, _ in pairs), *self.only_one, *self.only_other)]


def compare(one: Any, other: Any) -> StateComparison:
    """Compare two nested states bit by bit. Only a piece of one tensor of each state is in memory."""
    here, there = leaves(one), leaves(other)
    tensors = [leaf.tensor for leaf in here.values() if leaf.tensor]
    common = [path for path in here if path in there]
    return StateComparison(
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors),
        values=sum(not (leaf.tensor or leaf.is_filled) for leaf in here.values()),
        changed_tensors=tuple(_changed_tensors(here, there, common)),
        changed_values=tuple(
            (here[path], there[path])
            for path in common
            if not (here[path].tensor and there[path].tensor) and _has_changed(here[path], there[path])
        ),
        only_one=_only(here, there),
        only_other=_only(there, here),
    )


def _has_changed(one: Leaf, other: Leaf) -> bool:
    return one.text != other.text or (one.tensor is None) != (other.tensor is None)


def _only(here: Mapping[LeafPath, Leaf], there: Mapping[LeafPath, Leaf]) -> tuple[Leaf, ...]:
    """Return the leaves of `here` that are not in `there`; of a container that has items, only the items."""
    return tuple(leaf for path, leaf in here.items() if path not in there and not leaf.is_filled)


def _changed_tensors(
    here: Mapping[LeafPath, Leaf], there: Mapping[LeafPath, Leaf], common: Sequence[LeafPath]
) -> Iterator[ChangedTensor]:
    shared = [path for path in common if here[path].tensor and there[path].tensor]
    in_file_order = sorted(shared, key=lambda path: _position(here[path]))
    bits = {path: _bits(here[path], there[path]) for path in in_file_order}
    for path in shared:
        if (found := bits[path]) is None or found.count:
            yield ChangedTensor(here[path], there[path], found)


def _position(leaf: Leaf) -> int:
    return leaf.tensor.position if leaf.tensor else 0


def _bits(one: Leaf, other: Leaf) -> DifferentBits | None:
    is_alike = one.text == other.text
    return different_bits(one.tensor, other.tensor) if is_alike and one.tensor and other.tensor else None
