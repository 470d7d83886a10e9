"""The differences between a protected object and a saved state, in words for messages."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.train.state.object_state import Protectable
from holdfast.train.state.unwrapped_models import uncompiled_state

SHOWN = 4  # items of a list that a message names


def signature(thing: Protectable) -> Any:
    """Return a description without values: the names, dtypes and shapes of a model's tensors, or the class of another object."""
    if isinstance(thing, nn.Module):
        return {key: _kind(value) for key, value in uncompiled_state(thing).items() if isinstance(value, torch.Tensor)}
    return type(thing).__name__


def of_object(thing: Protectable, saved: Any) -> list[str]:
    """Return the differences between an object and its state `saved`, each to follow the name; empty if it fits."""
    try:
        if isinstance(thing, nn.Module):
            return _of_model(signature(thing), saved)
        return _of_optimizer(thing, saved) if isinstance(thing, torch.optim.Optimizer) else []
    except (KeyError, TypeError, AttributeError):  # a snapshot of unknown origin may hold anything
        return [" was something else"]


def _of_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    now = [len(group["params"]) for group in optimizer.param_groups]
    before = [len(group["params"]) for group in saved["param_groups"]]
    return [] if now == before else [f" has groups of {now} parameters, not {before}"]


def _of_model(now: Mapping[str, str], saved: Mapping[str, Any]) -> list[str]:
    before = {key: _kind(value) for key, value in saved.items() if isinstance(value, torch.Tensor)}
    return [
        *(f".{key} is {now[key]}, not {kind}" for key, kind in before.items() if key in now and now[key] != kind),
        *(f".{key} is new" for key in now if key not in before),
        *(f".{key} is gone" for key in before if key not in now),
    ]


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def listed(differences: list[str]) -> str:
    """Return one line of text with the first few `differences`, and the number of the remaining differences."""
    rest = len(differences) - SHOWN
    return "; ".join(differences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")
