"""The user's own model inside the wrappers of DDP and torch.compile, and its state_dict without their key prefixes.

A snapshot holds the tensor names of the user's own classes, so that it can be loaded into the plain model.
`torch.compile` adds `_orig_mod.` to the keys of the modules it wraps, at the beginning or in the middle. DDP adds
`module.` before all keys. holdfast saves the module inside DDP, so this prefix remains only where a compiled model was
wrapped in DDP first; then all keys begin with `_orig_mod.module.`. A bare `module.` is a name of the user's own.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # the name that torch.compile gives to the module it wraps
WRAPPED = "module."  # the prefix that DDP adds


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module inside the wrappers of DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), nn.Module):
            model = inner
        else:
            return model


def uncompiled_key(key: str) -> str:
    """Return the key of a tensor in a state_dict, without the parts that torch.compile adds."""
    return ".".join(part for part in key.split(".") if part != COMPILED) if COMPILED in key else key


def uncompiled_state(model: nn.Module) -> Mapping[str, Any]:
    """Return the state_dict of a model, without the prefixes that torch.compile adds to its keys."""
    state = model.state_dict()
    return _renamed(state, {name: uncompiled_key(name) for name in state})


def load_uncompiled(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a state_dict that `uncompiled_state` returned into `model`."""
    names = {uncompiled_key(name): name for name in model.state_dict()}
    model.load_state_dict(_renamed(saved, {name: names.get(name, name) for name in saved}))


def is_model_state(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Return True if `state` is the state_dict of an nn.Module, which has the attribute `_metadata`."""
    return isinstance(state, OrderedDict) and "_metadata" in vars(state)


def unwrapped_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `state` without the key prefixes of DDP and torch.compile, or unchanged if two keys would become equal."""
    both = f"{COMPILED}.{WRAPPED}"
    prefix = both if all(key.startswith(both) for key in state) else ""
    names = {key: uncompiled_key(key.removeprefix(prefix)) for key in state}
    return _renamed(state, names, prefix) if len(set(names.values())) == len(state) else state


def unwrapped_key(key: str) -> str:
    """Return `key`, from a weights file of another program, without the prefixes of DDP and torch.compile."""
    key = uncompiled_key(key)
    while key.startswith(WRAPPED):
        key = key.removeprefix(WRAPPED)
    return key


def _renamed(state: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> Mapping[str, Any]:
    """Return the state_dict with its keys renamed by `names`; also keep the layer versions in its `_metadata`."""
    if all(name == renamed for name, renamed in names.items()):
        return state
    renamed = OrderedDict((names[name], value) for name, value in state.items())
    if (versions := getattr(state, "_metadata", None)) is not None:
        paths = (
            (uncompiled_key(f"{path}.".removeprefix(prefix)).removesuffix("."), version)
            for path, version in versions.items()
        )
        vars(renamed)["_metadata"] = OrderedDict(paths)
    return renamed
