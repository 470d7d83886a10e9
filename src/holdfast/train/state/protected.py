"""The objects that a run protects: anything with `state_dict` and `load_state_dict`, saved and restored by name.

A snapshot holds the tensor names of the user's own classes, so that it can be loaded into the plain model.
`torch.compile` adds `_orig_mod.` to the keys of the modules it wraps, at the beginning or in the middle. DDP adds
`module.` before all keys. holdfast saves the module inside DDP, so this prefix remains only where a compiled model was
wrapped in DDP first; then all keys begin with `_orig_mod.module.`. A bare `module.` is a name of the user's own.
"""

import copy
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.payload import FlatState, flatten
from holdfast.errors import BadInput
from holdfast.train.state import plain_values
from holdfast.train.state.plain_values import PlainState
from holdfast.train.state.shards import DividedState, divide, is_dtensor, local

Value: TypeAlias = dict[Any, Any] | list[Any] | torch.Tensor | np.ndarray[Any, Any]
"""A plain value, which is restored in place."""
Copies: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of its values."""
SHOWN = 4  # differences that a message names
COMPILED = "_orig_mod"  # the name that torch.compile gives to the module it wraps
WRAPPED = "module."
BUFFERS = "(buffers)"  # ends the name under which a rank's buffers of a sharded model are saved


class Protectable(Protocol):
    """An object that can be protected: a model, optimizer, scheduler, gradient scaler, or a class of the user's own."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Protected:
    """Named objects whose state is restored after a failure. Wrapped models are unwrapped to the user's own module."""

    def __init__(self, things: Mapping[str, Protectable | Value]) -> None:
        if not things:
            raise BadInput(
                "protect() was given nothing: name what is to be restored, for example protect(model=model)."
            )
        for name, thing in things.items():
            plain_values.check(name, thing)
            is_stateful = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
            if not (is_stateful or plain_values.is_plain(thing)):
                raise BadInput(
                    f"{name} is a {type(thing).__name__}, which lacks state_dict or load_state_dict: add both."
                )
        self.things = {name: _inner(thing) for name, thing in things.items()}
        self._group_sizes = self._count_groups()

    def capture(self) -> dict[str, Any]:
        """Return the state of every object by name, without copying tensors."""
        return {name: _state(thing) for name, thing in self.things.items()}

    def signature(self) -> dict[str, Any]:
        """Return a description of the objects without values: tensor names and shapes of models, classes of others."""
        return {name: _signature(thing) for name, thing in self.things.items()}

    def own(self) -> dict[str, str]:
        """Return the values that belong to this rank alone, encoded as text by name.

        These are plain values (dicts, lists, tensors, arrays), and the buffers of sharded models, such as the running
        statistics of BatchNorm, which FSDP does not synchronize."""
        values = {
            name: plain_values.encode_small(name, thing.state_dict())
            for name, thing in self.things.items()
            if isinstance(thing, PlainState)
        }
        for name, thing in self.things.items():
            if isinstance(thing, nn.Module) and (buffers := _buffers_of_rank(thing)):
                values[f"{name}{BUFFERS}"] = plain_values.encode(name, buffers)
        return values

    @property
    def plain_names(self) -> set[str]:
        """The names of the protected plain values (dicts, lists, tensors, arrays)."""
        return {name for name, thing in self.things.items() if isinstance(thing, PlainState)}

    @property
    def has_plain_values(self) -> bool:
        """True if plain values (dicts, lists, tensors, arrays) are among the protected objects."""
        return bool(self.plain_names)

    @property
    def has_values_of_rank(self) -> bool:
        """True if values that belong to this rank alone are protected: plain values, or buffers of sharded models."""
        return self.has_plain_values or any(
            is_dtensor(parameter) and next(model.buffers(), None) is not None
            for model in self.models
            for parameter in model.parameters()
        )

    @property
    def has_values_of_script(self) -> bool:
        """True if plain values (dicts, lists, tensors) or objects of the user's own classes are protected."""
        return self.has_plain_values or bool(self.own_objects)

    def restore_own(self, saved: Mapping[str, str]) -> dict[str, Any]:
        """Restore this rank's own values from `saved`, the result of `own`; return the restored states by name."""
        states: dict[str, Any] = {}
        for key, text in saved.items():
            name = key.removesuffix(BUFFERS)
            state = plain_values.decode(name, text)
            if key.endswith(BUFFERS):
                whole = copy.copy(_state(self.things[name]))  # with the attributes of a model's state_dict
                whole.update(state)  # type: ignore[attr-defined]
                state = whole
            states[name] = state
            _restore(self.things[name], states[name])
        return states

    @property
    def models(self) -> list[nn.Module]:
        """The models among the protected objects."""
        return [thing for thing in self.things.values() if isinstance(thing, nn.Module)]

    @property
    def trained_models(self) -> list[nn.Module]:
        """The models that a protected optimizer trains; all models if none is, as in a trainer."""
        trained = {id(parameter) for optimizer in self.optimizers for parameter in _parameters(optimizer)}
        chosen = [model for model in self.models if any(id(parameter) in trained for parameter in model.parameters())]
        return chosen or self.models

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers among the protected objects."""
        return [thing for thing in self.things.values() if isinstance(thing, torch.optim.Optimizer)]

    def check_groups(self) -> None:
        """Raise BadInput if an optimizer got more parameters after `protect`: its saved state could not be loaded."""
        for name, now in self._count_groups().items():
            if now != (before := self._group_sizes[name]):
                raise BadInput(
                    f"{name} has groups of {now} parameters, and had {before} when it was protected: after a failure its "
                    "state could not be loaded. Give it all its groups at the beginning, with a learning rate of 0 for "
                    "those that are trained later."
                )

    def _count_groups(self) -> dict[str, list[int]]:
        return {
            name: [len(group["params"]) for group in thing.param_groups]
            for name, thing in self.things.items()
            if isinstance(thing, torch.optim.Optimizer)
        }

    @property
    def own_objects(self) -> dict[str, Protectable]:
        """The protected objects of the user's own classes, which may contain any other object."""
        known = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, PlainState)
        return {name: thing for name, thing in self.things.items() if not isinstance(thing, known)}

    @property
    def is_of_trainer(self) -> bool:
        """True if the protected object is a whole trainer (of Lightning or transformers)."""
        return any(type(thing).__module__.startswith("holdfast.") for thing in self.own_objects.values())

    @property
    def is_scaled(self) -> bool:
        """True if an enabled gradient scaler is among the protected objects."""
        return any(isinstance(thing, torch.amp.GradScaler) and thing.is_enabled() for thing in self.things.values())

    def divide(
        self, replicated: Iterable[nn.Module], rank: int, world_size: int, tensor_parallel: int = 1
    ) -> DividedState:
        """Divide the present state among the ranks, and return the part that `rank`, this rank, saves.

        The parameters of the models in `replicated` have the same values on every rank. Groups of `tensor_parallel`
        ranks train the same samples."""
        models = {id(unwrapped(model)) for model in replicated}
        parameters = {id(p) for model in self.models if id(model) in models for p in model.parameters()}
        shared: set[str] = set()
        for name, thing in self.things.items():
            if id(thing) in models and isinstance(thing, nn.Module):
                shared |= {f"{name}/{plain_name(key)}" for key, _ in thing.named_parameters(remove_duplicate=False)}
            elif isinstance(thing, torch.optim.Optimizer):
                shared |= _shared_moments(name, thing, parameters)
        return divide(flatten(self.capture()), shared, rank, world_size, tensor_parallel)

    def parameter_of(self, name: str) -> torch.Tensor | None:
        """Return the parameter of the optimizer state that a snapshot calls `name`; None if that is no optimizer state."""
        thing, _, rest = name.partition("/")
        optimizer, parts = self.things.get(thing), rest.split("/")
        if not isinstance(optimizer, torch.optim.Optimizer) or len(parts) < 3 or parts[0] != "state":
            return None
        parameters = [*_parameters(optimizer)]
        return parameters[int(parts[1])] if parts[1].isdecimal() and int(parts[1]) < len(parameters) else None

    @property
    def is_sharded(self) -> bool:
        """True if a protected model has parameters that are distributed over the ranks, as with FSDP2."""
        return any(is_dtensor(parameter) for model in self.models for parameter in model.parameters())

    def digest(self) -> str:
        """Return a digest of every bit of the present state of all protected objects."""
        return digest(flatten(self.capture()))

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return descriptions of all differences between the state `saved` and these objects; empty if it fits them."""
        return [
            *(f"{name} was not protected" for name in self.things if name not in saved),
            *(f"{name} is no longer protected" for name in saved if name not in self.things),
            *(
                f"{name}{difference}"
                for name, thing in self.things.items()
                if name in saved
                for difference in _differences(thing, saved[name])
            ),
        ]

    def trained(self) -> dict[str, Any]:
        """Return the state that gradients change: parameters, and the states of optimizers and gradient scalers."""
        kinds = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
        return {name: _trained(thing) for name, thing in self.things.items() if isinstance(thing, kinds)}

    def copy_averages(self) -> Copies:
        """Return pairs of a tensor and its copy, for the tensors of protected models that no optimizer trains.

        These are averages of weights, for example. Buffers of a trained model are left out: a forward pass changes
        them."""
        trained = {id(parameter) for optimizer in self.optimizers for parameter in _parameters(optimizer)}
        tensors: list[torch.Tensor] = []
        for model in self.models:
            untrained = [parameter for parameter in model.parameters() if id(parameter) not in trained]
            tensors += untrained
            if len(untrained) == len([*model.parameters()]):
                tensors += model.buffers()
        return [(tensor.detach(), tensor.detach().clone()) for tensor in tensors]

    def take_over(self, trained: Mapping[str, Any]) -> None:
        """Load `trained`, the parameters and optimizer states of another rank; keep all other state of this rank."""
        for name, state in trained.items():
            _restore(self.things[name], {**_state(self.things[name]), **state})

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load the state that `capture` returned, bit for bit. The objects do not share memory with `saved`."""
        self.restore_some({name: saved.get(name) for name in self.things})

    def restore_some(self, saved: Mapping[str, Any]) -> None:
        """Load the states in `saved` into the objects with their names. All other objects keep their state."""
        for name, state in saved.items():
            try:
                _restore(self.things[name], state)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                reason = " ".join(str(error).split())
                raise BadInput(f"{name} does not load its saved state ({type(error).__name__}: {reason}).") from error


def digest(flat: FlatState) -> str:
    """Return a digest of a flattened state; it does not depend on the device or the order of the tensors.

    For a distributed tensor, the digest covers only the part of this rank."""
    hasher = xxhash.xxh3_128(tree_digest(flat).encode())
    for name in sorted(flat.tensors):
        value = torch.as_tensor(local(flat.tensors[name])).detach()
        hasher.update(repr((name, value.dtype, tuple(value.shape))).encode())
        if value.numel():
            hasher.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


def tree_digest(flat: FlatState) -> str:
    """Return a digest of everything in a flattened state except its tensors."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(flat.extra["state"]).encode()))


def listed(differences: list[str]) -> str:
    """Return one line of text with the first few `differences`, and the number of the remaining differences."""
    rest = len(differences) - SHOWN
    return "; ".join(differences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _state(thing: Protectable) -> Mapping[str, Any]:
    return plain_state(thing) if isinstance(thing, nn.Module) else thing.state_dict()


def _inner(thing: Protectable | Value) -> Protectable:
    if plain_values.is_plain(thing):
        return PlainState(thing)
    return cast(Protectable, unwrapped(thing) if isinstance(thing, nn.Module) else thing)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _buffers_of_rank(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a sharded model, unless they are large: they may differ by rank. Else return none."""
    if not any(is_dtensor(parameter) for parameter in model.parameters()):
        return {}
    names = {plain_name(name) for name, _ in model.named_buffers()}
    buffers = {name: value for name, value in plain_state(model).items() if name in names and not is_dtensor(value)}
    size = sum(value.nbytes for value in buffers.values())
    return buffers if size <= plain_values.MAX_BYTES // 2 else {}  # large ones are tables, the same on every rank


def _shared_moments(name: str, optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> set[str]:
    return {
        f"{name}/state/{number}/{key}"
        for number, parameter in enumerate(_parameters(optimizer))
        if id(parameter) in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }


def _signature(thing: Protectable) -> Any:
    if isinstance(thing, nn.Module):
        return {key: _kind(value) for key, value in plain_state(thing).items() if isinstance(value, torch.Tensor)}
    return type(thing).__name__


def _differences(thing: Protectable, saved: Any) -> list[str]:
    try:
        if isinstance(thing, nn.Module):
            return _of_model(_signature(thing), saved)
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


def _trained(thing: Protectable) -> dict[str, Any]:
    state = dict(_state(thing))
    if isinstance(thing, nn.Module):
        parameters = {plain_name(name) for name, _ in thing.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in state.items() if name in parameters}
    if isinstance(thing, torch.optim.Optimizer):
        return {"state": state["state"]}
    return state


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _restore(thing: Protectable, saved: Any) -> None:
    if isinstance(thing, nn.Module):
        load_plain(thing, saved)  # it copies
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


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module inside the wrappers of DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get(COMPILED), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Return the name of a tensor in a state_dict, without the parts that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != COMPILED) if COMPILED in name else name


def plain_state(model: nn.Module) -> Mapping[str, Any]:
    """Return the state_dict of a model, without the prefixes that torch.compile adds to its keys."""
    state = model.state_dict()
    return _renamed(state, {name: plain_name(name) for name in state})


def load_plain(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a state_dict that `plain_state` returned into `model`."""
    names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict(_renamed(saved, {name: names.get(name, name) for name in saved}))


def is_model(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Return True if `state` is the state_dict of an nn.Module, which has the attribute `_metadata`."""
    return isinstance(state, OrderedDict) and "_metadata" in vars(state)


def own_keys(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `state` without the key prefixes of DDP and torch.compile, or unchanged if two keys would become equal."""
    both = f"{COMPILED}.{WRAPPED}"
    prefix = both if all(key.startswith(both) for key in state) else ""
    names = {key: plain_name(key.removeprefix(prefix)) for key in state}
    return _renamed(state, names, prefix) if len(set(names.values())) == len(state) else state


def without_wrappers(key: str) -> str:
    """Return `key`, from a weights file of another program, without the prefixes of DDP and torch.compile."""
    key = plain_name(key)
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
            (plain_name(f"{path}.".removeprefix(prefix)).removesuffix("."), version)
            for path, version in versions.items()
        )
        vars(renamed)["_metadata"] = OrderedDict(paths)
    return renamed
