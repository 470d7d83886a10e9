"""Search for the objects of a script that hold state and are not protected (saved and restored)."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from holdfast.train.observe.script_state import PLAIN, Place, Search, saved_memory
from holdfast.train.observe.value_samples import aligned, is_near, sampled
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import address

_VALUES = (*PLAIN, torch.Tensor, np.ndarray)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class UnprotectedObject:
    """An object with state that is not protected: its place in the script's memory, and a few of its present values.

    `kept` is the object, or a tensor in it. A later search recognises the same state by the identity of `kept`."""

    place: Place
    kept: object
    values: bytes
    is_copy: bool = False  # it equals a protected model

    @property
    def is_averaged_model(self) -> bool:
        """True if the object is a torch AveragedModel, which must be protected even before its first update."""
        return isinstance(self.place.value, AveragedModel)

    @property
    def can_be_protected(self) -> bool:
        """True if `run.protect` accepts the object as it is."""
        return isinstance(self.place.value, dict | list) or hasattr(self.place.value, "load_state_dict")


class ProtectedValues:
    """The protected state at one time: ids of its objects, memory of its tensors, and a few values of its models."""

    def __init__(self, protected: Protected) -> None:
        things = protected.things.values()
        self.memory = saved_memory(protected.capture())
        self.ids = {id(thing) for thing in things} | _ids_inside(protected.own_objects)
        self.scheduled = {id(thing.optimizer) for thing in things if isinstance(thing, LRScheduler)}
        self.parameters = [[p for p in model.parameters() if p.requires_grad] for model in protected.models]
        self.averaged = [sampled(parameters) for parameters in self.parameters]
        self.states = [sampled(_state(model)).tobytes() for model in protected.models]

    def unsaved(self, values: Iterable[object]) -> list[torch.Tensor]:
        """Return the tensors among `values` that share no memory with the protected state."""
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        return [tensor for tensor in tensors if (place := address(tensor)) is not None and place not in self.memory]


def unprotected_objects(
    begin: Iterable[Place], now: ProtectedValues, before: ProtectedValues | None, *, averages: bool
) -> list[UnprotectedObject]:
    """Search from the places `begin` for modules, scalers, schedulers and optimizers that are not protected.

    With `averages`, also find dicts and lists of tensors that resemble a protected model. `now` has the present
    protected values, and `before` the protected values at the last search. An object that equals a model in either is
    marked as a copy."""
    found: list[UnprotectedObject] = []
    inside: set[int] = set()  # modules inside others
    search = Search(begin)
    for place in search:
        with suppress(Exception):  # a script may hold anything, such as a proxy of an object that does not exist yet
            value = place.value
            if isinstance(value, _VALUES) or id(value) in now.ids:
                continue
            if isinstance(value, nn.Module):
                if id(value) not in inside:
                    inside |= {id(module) for module in value.modules()}
                    found += _module(place, now, before)
            elif isinstance(value, torch.amp.GradScaler | LRScheduler | Optimizer):
                found += _trainer(place, now)
            elif averages and isinstance(value, dict | list | tuple):
                found += _average(place, now, before)
            search.expand(place)
    return found


def _module(place: Place, now: ProtectedValues, before: ProtectedValues | None) -> Iterator[UnprotectedObject]:
    """Yield the module at `place` if part of its state is not protected. Leave out metrics, which scripts reset."""
    module: nn.Module = place.value
    is_metric = next(module.parameters(), None) is None and hasattr(module, "reset")
    if now.unsaved(_state(module)) and not is_metric:
        values = sampled(_state(module)).tobytes()
        copied = [*now.states, *(before.states if before else ())]
        yield UnprotectedObject(place=place, kept=module, values=values, is_copy=values in copied)


def _trainer(place: Place, now: ProtectedValues) -> Iterator[UnprotectedObject]:
    value: torch.amp.GradScaler | LRScheduler | Optimizer = place.value
    if isinstance(value, Optimizer):
        if tensors := now.unsaved(item for state in value.state.values() for item in state.values()):
            yield UnprotectedObject(place=place, kept=value, values=sampled(tensors).tobytes())
    elif not (isinstance(value, LRScheduler) and id(value.optimizer) in now.scheduled):  # part of a protected one
        numbers = {key: item for key, item in value.state_dict().items() if isinstance(item, int | float)}
        yield UnprotectedObject(place=place, kept=value, values=repr(numbers).encode())


def _average(place: Place, now: ProtectedValues, before: ProtectedValues | None) -> Iterator[UnprotectedObject]:
    """Yield the dict or list at `place` if it holds tensors that resemble the parameters of a protected model.

    `now` has the present values of the protected models, and `before` their values at the last search."""
    items = place.value.values() if isinstance(place.value, dict) else place.value
    tensors = now.unsaved(items) if isinstance(next(iter(items), None), torch.Tensor) else []  # a list may be long
    for model, parameters in enumerate(now.parameters):
        match = aligned(tensors, parameters) if 0 < len(parameters) <= len(tensors) else None
        if match is None or not is_near(values := sampled(match), now.averaged[model]):
            continue
        owner = place.inside or place
        copied = [now.averaged[model], *([before.averaged[model]] if before else [])]
        yield UnprotectedObject(
            place=owner,
            kept=match[0] if owner is place else owner.value,  # a dict may be the same with other tensors in it
            values=values.tobytes(),
            is_copy=any(np.array_equal(values, other) for other in copied),
        )
        return


def _state(module: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that the module's state_dict would save, without running code of the script."""
    buffers = [
        buffer
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]
    return [*module.parameters(), *buffers]


def _ids_inside(objects: dict[str, Any]) -> set[int]:
    """Return the `id()` of every value inside the protected `objects`."""
    ids: set[int] = set()
    search = Search(Place(value, name) for name, value in objects.items())
    for place in search:
        with suppress(Exception):
            ids.add(id(place.value))
            search.expand(place)
    return ids
