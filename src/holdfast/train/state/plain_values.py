"""Plain values that a run protects, such as `progress={"best": inf}`: put back in place, so that a script's own names
for them stay good.

Unlike models they may be a rank's own, as a running sum over its share is. So every rank hands its own to the save, and
after a restart with as many ranks each gets back what it had.
"""

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.state_tree import Flat, flatten, unflatten
from holdfast.errors import BadInput

MOST = 1 << 20  # bytes that plain values of a rank may take: they go through the store of the workers
VALUE = "value"


class Plain:
    """A dict, a list, a tensor or an array with the state_dict that it lacks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Mapping[str, Any]:
        return {VALUE: dict(self.value) if isinstance(self.value, dict) else self.value}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        _put_back(self.value, copy.deepcopy(state[VALUE]))


def is_plain(value: object) -> bool:
    """Whether it is a value that can be put back in place."""
    return isinstance(value, dict | list | torch.Tensor | np.ndarray)


def check(name: str, value: object) -> None:
    """Refuse what cannot be put back in place, or cannot be saved."""
    if value is None or isinstance(value, bool | int | float | str | tuple):
        raise BadInput(
            f"{name} is a {type(value).__name__}, which nobody can put back in place: write "
            f"values = {{{name!r}: ...}}, protect(..., values=values), and use values[{name!r}]"
        )
    if is_plain(value):
        spoken(name, Plain(value).state_dict())


def spoken(name: str, state: Any) -> str:
    """The state of plain values as text; not of too many."""
    text = as_text(name, state)
    if len(text) > MOST:
        raise BadInput(
            f"{name} takes {len(text)} bytes, and plain values may take {MOST}: put it into a class with state_dict"
        )
    return text


def as_text(name: str, state: Any) -> str:
    """A state as text, every bit of it; what would have to be pickled is refused by its name."""
    flat = flatten({name: state})
    tensors = {key: torch.as_tensor(value) for key, value in flat.tensors.items()}
    scalars = [key for key, value in flat.tensors.items() if not isinstance(value, torch.Tensor)]
    about = {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in tensors.items()}
    values = {
        key: base64.b64encode(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        for key, value in tensors.items()
        if value.numel()
    }
    return json.dumps([flat.extra, about, values, scalars])


def heard(name: str, text: str) -> Any:
    """The state that was spoken."""
    extra, about, values, scalars = json.loads(text)
    tensors: dict[str, Any] = {}
    for key, (kind, shape) in about.items():
        data = bytearray(base64.b64decode(values.get(key, "")))
        dtype = getattr(torch, kind)
        value = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
        tensors[key] = value.numpy() if key in scalars else value
    flat = Flat(tensors, extra)
    return unflatten(flat.tensors, flat.extra)[name]


def _put_back(target: Any, saved: Any) -> None:
    """Give what is there the saved values; dicts and lists inside of it stay the ones that they are."""
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
                _put_back(target[key], value)
            else:
                target[key] = value
