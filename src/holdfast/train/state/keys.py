"""The keys of a model's state_dict as the user's own module has them, without what wrappers put before them. Pure.

`torch.compile` puts `_orig_mod.` before the keys of what it wraps, at the beginning or in the middle. DDP puts
`module.` before all keys; holdfast saves what is inside of DDP, so that one is left only where a compiled model was
wrapped in DDP first, and then all keys begin with `_orig_mod.module.`. A bare `module.` is a name of the user's own.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

COMPILED, WRAPPED = "_orig_mod.", "module."


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
    key = key.replace(COMPILED, "")
    while key.startswith(WRAPPED):
        key = key.removeprefix(WRAPPED)
    return key


def _renaming(keys: Iterable[str]) -> Callable[[str], str]:
    both = COMPILED + WRAPPED
    if all(key.startswith(both) for key in keys):
        return lambda key: key.removeprefix(both).replace(COMPILED, "")
    return lambda key: key.replace(COMPILED, "")
