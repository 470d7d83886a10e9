"""The leaves of a nested state, by path: its tensors, and its plain values as text. No I/O.

Two states are equal if and only if they have the same leaves. Containers count too, so that an empty dict is not the same
as no dict, and a list not the same as a tuple. The order of the keys in a dict does not count.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast.checkpoint.stored_tensor import StoredTensor, of_tensor

LeafPath: TypeAlias = tuple[str, ...]
ATTRIBUTES = "(attributes)"  # of a model's state_dict: the versions of its layers


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor or a plain value of a state, with a name such as "optimizer/state/0/exp_avg".

    `text` is the plain value as text, in which -0.0 is not 0.0 and 1 is not True. For a tensor, it is its dtype and shape.
    `is_filled` is True for a container that has items, which are leaves of their own."""

    name: str
    text: str
    tensor: StoredTensor | None = None
    is_filled: bool = False


def leaves(tree: Any) -> dict[LeafPath, Leaf]:
    """Return the leaves of the nested dicts, lists and tuples in `tree`, by the keys that lead to them."""
    found: dict[LeafPath, Leaf] = {}
    waiting: list[tuple[LeafPath, str, Any]] = [((), "", tree)]
    while waiting:
        path, name, value = waiting.pop()
        items = [*_items(value)]
        found[path] = _leaf(name, value, is_filled=bool(items))
        inside = [((*path, key), f"{name}/{text}" if name else text, item) for key, text, item in items]
        waiting += reversed(inside)
    return found


def _items(value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, key as people write it, item) for the items of a container. The keys 1 and "1" are different."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key), str(key), item
        if attributes := getattr(value, "__dict__", None):
            yield ATTRIBUTES, ATTRIBUTES, attributes
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield repr(index), str(index), item


def _leaf(name: str, value: Any, *, is_filled: bool) -> Leaf:
    if isinstance(value, Mapping | list | tuple):
        kind = type(value).__name__
        return Leaf(name, f"{'an' if kind[:1] in 'AEIOU' else 'a'} {kind}", is_filled=is_filled)
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value)
    tensor = of_tensor(value) if isinstance(value, torch.Tensor) else value
    if isinstance(tensor, StoredTensor):
        return Leaf(name, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}", tensor)
    return Leaf(name, repr(value))
