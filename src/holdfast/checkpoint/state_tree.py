"""Convert nested state_dicts to flat tensors plus JSON, and back exactly, without pickle."""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.blocks.division import Array
from holdfast.checkpoint import payload
from holdfast.errors import BadInput, Corrupt

BYTES_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A flattened state: its tensors by path, and everything else as JSON that refers to them."""

    tensors: dict[str, Array]
    extra: dict[str, Any]


def flatten(state: Any) -> Flat:
    """Flatten dicts, lists, tuples, numbers, strings, None, bytes, tensors and arrays; raise BadInput for anything else."""
    tensors: dict[str, Array] = {}
    try:
        tree = _take_apart(state, "", tensors)
    except RecursionError as error:
        raise BadInput("the state contains itself, or is nested too deeply to be saved.") from error
    return Flat(tensors, {"state": tree})


def unflatten(tensors: dict[str, Array], extra: dict[str, Any]) -> Any:
    """Return the state that was flattened, with its tensors on the CPU."""
    try:
        return _put_together(extra["state"], _Once(tensors))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"the extra of this snapshot does not describe a state ({error!r:.200}).") from error


class _Once:
    """Tensors that can each be taken once: otherwise a small tree that names one tensor a thousand times would become a
    huge state as soon as it is copied.
    """

    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = dict(tensors)

    def take(self, name: str) -> Array:
        return self._tensors.pop(name)


# JSON has null, booleans, integers, finite floats, strings and lists; everything else is an object with one key, its tag.
def _take_apart(value: Any, path: str, tensors: dict[str, Array]) -> Any:
    # Exact types: a subclass, such as a named tuple or numpy's float64, would not be restored as the same type.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": _text(value, path)}
    if kind is list:
        return [_take_apart(item, _join(path, i), tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_take_apart(item, _join(path, i), tensors) for i, item in enumerate(value)]}
    if kind is dict:
        return {"dict": _pairs(value, path, tensors)}
    if kind is Counter:  # for example the milestones of a learning-rate schedule
        return {"counter": _pairs(value, path, tensors)}
    if kind is OrderedDict:
        # A module's state_dict has the versions of its layers in an attribute, which load_state_dict reads.
        attributes = _take_apart(vars(value), _join(path, "(attributes)"), tensors)
        return {"ordered": [_pairs(value, path, tensors), attributes]}
    if isinstance(value, np.generic):
        return {"scalar": _name(np.asarray(value), path, tensors)}
    if isinstance(value, torch.Tensor | np.ndarray):
        return {"tensor": _name(value, path, tensors)}
    raise BadInput(
        f"{path or 'the state'} is a {kind.__qualname__}, which cannot be saved: make it a number or a tensor."
    )


def _put_together(tree: Any, tensors: _Once) -> Any:
    if isinstance(tree, list):
        return [_put_together(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    return _TAGS[tag](content, tensors)


def _pairs(value: dict[Any, Any], path: str, tensors: dict[str, Array]) -> list[list[Any]]:
    # Pairs instead of a JSON object, because optimizers have integer keys and the order matters.
    pairs = []
    for key, item in value.items():
        if key is not None and type(key) not in (bool, int, str, float):
            raise BadInput(f"{path or 'the state'} has a key of type {type(key).__qualname__}: use strings or numbers.")
        pairs.append([_take_apart(key, path, tensors), _take_apart(item, _join(path, key), tensors)])
    return pairs


def _from_pairs(pairs: list[list[Any]], tensors: _Once) -> list[tuple[Any, Any]]:
    return [(_put_together(key, tensors), _put_together(item, tensors)) for key, item in pairs]


def _from_ordered(content: list[Any], tensors: _Once) -> "OrderedDict[Any, Any]":
    pairs, attributes = content
    result = OrderedDict(_from_pairs(pairs, tensors))
    given = dict(_put_together(attributes, tensors))
    if any(not isinstance(name, str) or hasattr(OrderedDict, name) for name in given):
        raise ValueError("an attribute replaces one of the dict's own")
    vars(result).update(given)
    return result


_TAGS: dict[str, Callable[[Any, _Once], Any]] = {
    "float": lambda text, _: float(text),
    "bytes": lambda text, _: base64.b64decode(text, validate=True),
    "tuple": lambda items, tensors: tuple(_put_together(item, tensors) for item in items),
    "dict": lambda pairs, tensors: dict(_from_pairs(pairs, tensors)),
    "counter": lambda pairs, tensors: Counter(dict(_from_pairs(pairs, tensors))),
    "ordered": _from_ordered,
    "scalar": lambda name, tensors: np.asarray(tensors.take(name))[()],
    "tensor": lambda name, tensors: tensors.take(name),
}


def _name(value: Array, path: str, tensors: dict[str, Array]) -> str:
    name = path or "state"
    while name in tensors or name == "__metadata__":
        name += "'"  # distinguishes {"a/b": x, "a": {"b": y}}
    payload.check(name, value)
    tensors[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return name


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _text(value: bytes, path: str) -> str:
    if len(value) > BYTES_LIMIT:
        raise BadInput(
            f"{path} holds {len(value)} bytes, more than the {BYTES_LIMIT} allowed in JSON: make it a tensor."
        )
    return base64.b64encode(value).decode()
