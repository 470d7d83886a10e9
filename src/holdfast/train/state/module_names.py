"""The user's own module inside of what DDP and torch.compile put around it, and the names that it gives its tensors.

A snapshot holds the names that the user's classes give, so that it can be loaded into the plain model; whether a model
is compiled or replicated is no part of what it is.

The keys of a model's state_dict as the user's own module has them, without what wrappers put before them. Pure.

`torch.compile` puts `_orig_mod.` before the keys of what it wraps, at the beginning or in the middle. DDP puts
`module.` before all keys; holdfast saves what is inside of DDP, so that one is left only where a compiled model was
wrapped in DDP first, and then all keys begin with `_orig_mod.module.`. A bare `module.` is a name of the user's own.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"  # what torch.compile calls the module that it wraps


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, wrapped or not, in any order."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """The name of a tensor in the user's own classes, though a part of the model may be compiled."""
    return ".".join(part for part in name.split(".") if part != COMPILED) if COMPILED in name else name


def plain_state(model: nn.Module) -> Mapping[str, Any]:
    """The state of a model by the user's own names."""
    state = model.state_dict()
    return _renamed(state, {name: plain_name(name) for name in state}) if _is_wrapped(state) else state


def load_plain(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a state back that was saved by the user's own names, or before they were used by those of wrapped parts."""
    now = model.state_dict()
    if _is_wrapped(now) or _is_wrapped(saved):
        names = {plain_name(name): name for name in now}
        saved = _renamed(saved, {name: names.get(plain_name(name), name) for name in saved})
    model.load_state_dict(saved)


def _is_wrapped(state: Mapping[str, Any]) -> bool:
    return any(COMPILED in name for name in state)


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> Mapping[str, Any]:
    """The same state under other names; the versions of layers that load_state_dict reads go with it."""
    renamed = type(state)((names[name], value) for name, value in state.items())  # type: ignore[call-arg]
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = type(versions)((plain_name(path), each) for path, each in versions.items())  # type: ignore[attr-defined]
    return renamed


COMPILED_PREFIX, WRAPPED = "_orig_mod.", "module."


def is_model(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a saved state is that of a module: only those carry the versions of their layers."""
    return isinstance(state, OrderedDict) and "_metadata" in vars(state)


def own_keys(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same state_dict with the user's own keys; as it is, if two of them would be the same then."""
    rename = _renaming(state)
    renamed = OrderedDict((rename(key), value) for key, value in state.items())
    if len(renamed) < len(state) or list(renamed) == list(state):
        return state
    if is_model(state):
        versions = vars(state)["_metadata"]
        vars(renamed)["_metadata"] = OrderedDict((rename(f"{key}.")[:-1], each) for key, each in versions.items())
    return renamed


def without_wrappers(key: str) -> str:
    """A key of a foreign file without anything that a wrapper may have put before it."""
    key = key.replace(COMPILED_PREFIX, "")
    while key.startswith(WRAPPED):
        key = key.removeprefix(WRAPPED)
    return key


def _renaming(keys: Iterable[str]) -> Callable[[str], str]:
    both = COMPILED_PREFIX + WRAPPED
    if all(key.startswith(both) for key in keys):
        return lambda key: key.removeprefix(both).replace(COMPILED_PREFIX, "")
    return lambda key: key.replace(COMPILED_PREFIX, "")
