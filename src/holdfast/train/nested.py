"""Tensors inside of whatever a collate function makes: dicts, lists, tuples, dataclasses, and things of a library's own."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def moved(value: Any, *where: Any, **how: Any) -> Any:
    """The same structure with every tensor moved, as by `Tensor.to`; what cannot be moved stays as it is."""
    if hasattr(value, "to"):  # a tensor; or a class that knows how to move what it holds
        return value.to(*where, **how)
    if isinstance(value, Mapping):
        return type(value)({key: moved(item, *where, **how) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, *where, **how) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(item, *where, **how) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
        return dataclasses.replace(value, **{name: moved(item, *where, **how) for name, item in fields.items()})
    return value
