"""The state of one protected object: it is captured without a copy, and restored bit for bit."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from holdfast.train.state.plain_values import MAX_BYTES
from holdfast.train.state.shards import is_dtensor, is_sharded
from holdfast.train.state.unwrapped_models import load_uncompiled, uncompiled_key, uncompiled_state


class Protectable(Protocol):
    """An object that can be protected: a model, optimizer, scheduler, gradient scaler, or a class of the user's own."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def capture(thing: Protectable) -> Mapping[str, Any]:
    """Return the state_dict of an object, without copying tensors; the keys of a model are those of its own classes."""
    return uncompiled_state(thing) if isinstance(thing, nn.Module) else thing.state_dict()


def trained(thing: Protectable) -> dict[str, Any]:
    """Return the part of the state that gradients change: parameters, or the moments of an optimizer, without its options."""
    state = dict(capture(thing))
    if isinstance(thing, nn.Module):
        parameters = {uncompiled_key(name) for name, _ in thing.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in state.items() if name in parameters}
    if isinstance(thing, torch.optim.Optimizer):
        return {"state": state["state"]}
    return state


def buffers_of_rank(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a sharded model, unless they are large: they may differ by rank. Else return none."""
    if not is_sharded(model):
        return {}
    names = {uncompiled_key(name) for name, _ in model.named_buffers()}
    buffers = {
        name: value for name, value in uncompiled_state(model).items() if name in names and not is_dtensor(value)
    }
    size = sum(value.nbytes for value in buffers.values())
    return buffers if size <= MAX_BYTES // 2 else {}  # large ones are tables, the same on every rank


def restore(thing: Protectable, saved: Any) -> None:
    """Load a state that `capture` returned. The object does not share memory with `saved`."""
    if isinstance(thing, nn.Module):
        load_uncompiled(thing, saved)  # it copies
        return
    state = _copied(saved)
    thing.load_state_dict(state)
    if isinstance(thing, torch.optim.Optimizer):
        _keep_types(thing, state)


def _keep_types(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Convert loaded optimizer state back to the dtypes in `saved`, because load_state_dict changes the dtypes."""
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], before["params"], strict=True):
            for key, value in saved["state"].get(number, {}).items():
                now = optimizer.state[parameter][key]
                if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)


def _copied(value: Any) -> Any:
    """Return a deep copy of a state, so that no tensor keeps the snapshot's large common buffer in memory."""
    if isinstance(value, torch.Tensor):
        return value if is_dtensor(value) else value.clone()  # a DTensor has memory of its own
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
