"""Protected plain values, such as `progress={"best": inf}`, which are restored in place.

The script's references to the values stay valid. Unlike models, plain values may differ between ranks, for example a
running sum over a rank's samples. So every rank saves its own values, and after a restart with the same world size each
rank gets its own values back.
"""

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.errors import BadInput

MAX_BYTES = 1 << 20  # of the plain values of one rank: they go through the workers' store
VALUE = "value"


class PlainState:
    """A wrapper that gives a dict, list, tensor or array the methods state_dict and load_state_dict."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Mapping[str, Any]:
        return {VALUE: dict(self.value) if isinstance(self.value, dict) else self.value}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        _assign(self.value, copy.deepcopy(state[VALUE]))


def is_plain(value: object) -> bool:
    """Return True if `value` is of a type whose content can be restored in place: dict, list, tensor or array."""
    return isinstance(value, dict | list | torch.Tensor | np.ndarray)


def check(name: str, value: object) -> None:
    """Raise BadInput if `value` cannot be restored in place or cannot be saved. The message mentions `name`."""
    if value is None or isinstance(value, bool | int | float | str | tuple):
        raise BadInput(
            f"{name} is a {type(value).__name__}, which cannot be restored in place: write "
            f"values = {{{name!r}: ...}}, protect(..., values=values), and use values[{name!r}]."
        )
    if is_plain(value):
        encode_small(name, PlainState(value).state_dict())


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


def _assign(target: Any, saved: Any) -> None:
    """Copy the saved values into `target` in place; dicts and lists inside a dict stay the same objects."""
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(torch.as_tensor(saved))
    elif isinstance(target, np.ndarray):
        target[...] = np.asarray(saved)
    elif isinstance(target, list):
        target[:] = saved
    else:
        for key in [key for key in target if key not in saved]:
            del target[key]
        for key, value in saved.items():
            if type(target.get(key)) is type(value) and isinstance(value, dict | list):
                _assign(target[key], value)
            else:
                target[key] = value
