"""The user's own module inside DDP and torch.compile, and the names of its tensors without what wrappers prepend.

A snapshot holds the names that the user's classes give, so that it can be loaded into the plain model. `torch.compile`
puts `_orig_mod.` before the keys of what it wraps, at the beginning or in the middle. DDP puts `module.` before all
keys; holdfast saves the module inside DDP, so a `module.` is left only where a compiled model was wrapped in DDP first,
and then all keys begin with `_orig_mod.module.`. A bare `module.` is a name of the user's own.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # the name that torch.compile gives to the module it wraps
WRAPPED = "module."


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module inside any wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Return the name of a tensor in the user's own classes, also if a part of the model is compiled."""
    return ".".join(part for part in name.split(".") if part != COMPILED) if COMPILED in name else name


def plain_state(model: nn.Module) -> Mapping[str, Any]:
    """Return the state_dict of a model under the user's own names."""
    state = model.state_dict()
    return _renamed(state, {name: plain_name(name) for name in state})


def load_plain(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a state that was saved by `plain_state`."""
    names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict(_renamed(saved, {name: names.get(name, name) for name in saved}))


def is_model(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Return True if a saved state is that of a module: only modules save the versions of their layers."""
    return isinstance(state, OrderedDict) and "_metadata" in vars(state)


def own_keys(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the same state_dict under the user's own names; unchanged if two names would become the same."""
    both = f"{COMPILED}.{WRAPPED}"
    prefix = both if all(key.startswith(both) for key in state) else ""
    names = {key: plain_name(key.removeprefix(prefix)) for key in state}
    return _renamed(state, names, prefix) if len(set(names.values())) == len(state) else state


def without_wrappers(key: str) -> str:
    """Return a key of a foreign file without anything that a wrapper may have prepended."""
    key = plain_name(key)
    while key.startswith(WRAPPED):
        key = key.removeprefix(WRAPPED)
    return key


def _renamed(state: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> Mapping[str, Any]:
    """Return the state under other names, with the versions of layers that load_state_dict reads."""
    if all(name == renamed for name, renamed in names.items()):
        return state
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        paths = (
            (plain_name(f"{path}.".removeprefix(prefix)).removesuffix("."), version)
            for path, version in versions.items()
        )
        vars(renamed)["_metadata"] = OrderedDict(paths)
    return renamed
