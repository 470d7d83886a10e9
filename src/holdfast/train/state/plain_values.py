"""Protected plain values, such as `progress={"best": inf}`, which are restored in place.

The script's references to the values stay valid. So do other names for a tensor in a dict, as long as the script only
writes into this tensor: a snapshot records which tensors are still the objects that the script had protected, and these
are overwritten. A tensor that the script had replaced by another is replaced in the restore too, since the old tensor
may have other uses. Unlike models, plain values may differ between ranks, for example a
running sum over a rank's samples. So every rank saves its own values, and after a restart with the same world size each
rank gets its own values back.
"""

import base64
import copy
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.errors import BadInput

PlainValue: TypeAlias = dict[Any, Any] | list[Any] | torch.Tensor | np.ndarray[Any, Any]
"""A value that is restored in place."""
MAX_BYTES = 1 << 20  # of the plain values of one rank: they go through the workers' store
VALUE = "value"
KEPT = "kept"  # the paths of tensors in the value that the script has not replaced since it protected the value


class PlainState:
    """A wrapper that gives a dict, list, tensor or array the methods state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._first = {} if _is_tensor(value) else dict(_tensors(value))

    def state_dict(self) -> Mapping[str, Any]:
        value = dict(self.value) if isinstance(self.value, dict) else self.value
        kept = [path for path, tensor in _tensors(self.value) if tensor is self._first.get(path)]
        return {VALUE: value, **({KEPT: kept} if kept else {})}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        saved = copy.deepcopy(state[VALUE])
        if _is_tensor(self.value):
            _overwrite(self.value, saved)
        else:
            self._fill(self.value, saved, "", state.get(KEPT, ()))

    def _fill(self, target: Any, saved: Any, path: str, kept: Collection[str]) -> None:
        """Put the items of `saved` into `target` in place; dicts and lists inside a dict stay the same objects."""
        if isinstance(target, list):
            target[:] = [self._restored(None, item, f"{path}[{index}]", kept) for index, item in enumerate(saved)]
            return
        for key in [key for key in target if key not in saved]:
            del target[key]
        for key, item in saved.items():
            target[key] = self._restored(target.get(key), item, f"{path}[{key!r}]", kept)

    def _restored(self, current: Any, saved: Any, path: str, kept: Collection[str]) -> Any:
        """Return the object with the value `saved` to put at `path`, where `current` is now."""
        if path in kept:
            first = self._first.get(path)
            if not _has_form_of(first, saved):
                first = self._first[path] = saved
            _overwrite(first, saved)
            return first
        if not isinstance(saved, dict | list):
            return saved
        container = current if type(current) is type(saved) else saved
        self._fill(container, saved, path, kept)
        return container


def is_plain(value: object) -> bool:
    """Return True if `value` is of a type whose content can be restored in place: dict, list, tensor or array."""
    return isinstance(value, dict | list | torch.Tensor | np.ndarray)


def check(name: str, value: object) -> None:
    """Raise BadInput if `value` cannot be restored in place or cannot be saved. The message mentions `name`."""
    if value is None or isinstance(value, bool | int | float | str | tuple):
        raise BadInput(
            f"{name} is a {type(value).__name__}, which cannot be restored in place: {advice_for_value(name)}."
        )
    if is_plain(value):
        encode_small(name, PlainState(value).state_dict())


def advice_for_value(name: str) -> str:
    """Return advice to keep the variable `name` in a protected dict, for messages."""
    return f"write values = {{{name!r}: ...}}, protect(..., values=values), and use values[{name!r}]"


def encode_small(name: str, state: Any) -> str:
    """Return `state` encoded as text; raise BadInput, which mentions `name`, if it is longer than MAX_BYTES."""
    text = encode(name, state)
    if len(text) > MAX_BYTES:
        raise BadInput(
            f"{name} takes {len(text)} bytes, and plain values may take {MAX_BYTES}: put it into a class with state_dict."
        )
    return text


def encode(name: str, state: Any) -> str:
    """Return `state` as text, with every bit of its numbers; raise BadInput for a value that only pickle could save.

    The message mentions `name`, and `decode` needs the same name."""
    flat = flatten({name: state})
    tensors = {key: torch.as_tensor(value) for key, value in flat.tensors.items()}
    scalars = [key for key, value in flat.tensors.items() if not isinstance(value, torch.Tensor)]
    kinds = {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in tensors.items()}
    values = {
        key: base64.b64encode(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        for key, value in tensors.items()
        if value.numel()
    }
    return json.dumps([flat.extra, kinds, values, scalars])


def decode(name: str, text: str) -> Any:
    """Return the state from a text that `encode` wrote with the same `name`."""
    extra, kinds, values, scalars = json.loads(text)
    tensors: dict[str, Any] = {}
    for key, (kind, shape) in kinds.items():
        data = bytearray(base64.b64decode(values.get(key, "")))
        dtype = getattr(torch, kind)
        value = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        tensors[key] = value.numpy() if key in scalars else value
    return unflatten(tensors, extra)[name]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor) for each tensor or array in nested dicts and lists, such as ("['mean']", mean)."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{path}[{key!r}]")
    elif _is_tensor(value):
        yield path, value


def _has_form_of(target: Any, saved: Any) -> bool:
    """Return True if `saved` can be written into `target`: both have the same shape and dtype."""
    if isinstance(target, np.ndarray):
        is_array = isinstance(saved, np.ndarray) and target.flags.writeable
        return is_array and (target.shape, target.dtype) == (saved.shape, saved.dtype)
    if not isinstance(target, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return False
    is_expanded = any(size > 1 and not stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return (target.shape, target.dtype) == (saved.shape, saved.dtype) and not is_expanded


def _overwrite(target: Any, saved: Any) -> None:
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(torch.as_tensor(saved))
    else:
        target[...] = np.asarray(saved)
