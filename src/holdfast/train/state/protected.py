"""The objects that a run protects: anything with `state_dict` and `load_state_dict`, saved and restored by name."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.payload import flatten
from holdfast.errors import BadInput
from holdfast.train.state import differences, object_state, plain_values, state_digests
from holdfast.train.state.object_state import Protectable
from holdfast.train.state.plain_values import PlainState, PlainValue
from holdfast.train.state.shards import DividedState, divide, is_sharded
from holdfast.train.state.unwrapped_models import uncompiled_key, unwrapped

Copies: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of its values."""
BUFFERS = "(buffers)"  # ends the name under which a rank's buffers of a sharded model are saved


class Protected:
    """Named objects whose state is restored after a failure. Wrapped models are unwrapped to the user's own module."""

    def __init__(self, things: Mapping[str, Protectable | PlainValue]) -> None:
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
        return {name: object_state.capture(thing) for name, thing in self.things.items()}

    def signature(self) -> dict[str, Any]:
        """Return a description of the objects without values: tensor names and shapes of models, classes of others."""
        return {name: differences.signature(thing) for name, thing in self.things.items()}

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
            if isinstance(thing, nn.Module) and (buffers := object_state.buffers_of_rank(thing)):
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
            is_sharded(model) and next(model.buffers(), None) is not None for model in self.models
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
                whole = copy.copy(object_state.capture(self.things[name]))  # with the attributes of a state_dict
                whole.update(state)  # type: ignore[attr-defined]
                state = whole
            states[name] = state
            object_state.restore(self.things[name], states[name])
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
                shared |= {f"{name}/{uncompiled_key(key)}" for key, _ in thing.named_parameters(remove_duplicate=False)}
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
        return any(is_sharded(model) for model in self.models)

    def digest(self) -> str:
        """Return a digest of every bit of the present state of all protected objects."""
        return state_digests.digest(flatten(self.capture()))

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return descriptions of all differences between the state `saved` and these objects; empty if it fits them."""
        return [
            *(f"{name} was not protected" for name in self.things if name not in saved),
            *(f"{name} is no longer protected" for name in saved if name not in self.things),
            *(
                f"{name}{difference}"
                for name, thing in self.things.items()
                if name in saved
                for difference in differences.of_object(thing, saved[name])
            ),
        ]

    def trained(self) -> dict[str, Any]:
        """Return the state that gradients change: parameters, and the states of optimizers and gradient scalers."""
        kinds = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
        return {name: object_state.trained(thing) for name, thing in self.things.items() if isinstance(thing, kinds)}

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
            object_state.restore(self.things[name], {**object_state.capture(self.things[name]), **state})

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load the state that `capture` returned, bit for bit. The objects do not share memory with `saved`."""
        self.restore_some({name: saved.get(name) for name in self.things})

    def restore_some(self, saved: Mapping[str, Any]) -> None:
        """Load the states in `saved` into the objects with their names. All other objects keep their state."""
        for name, state in saved.items():
            try:
                object_state.restore(self.things[name], state)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                reason = " ".join(str(error).split())
                raise BadInput(f"{name} does not load its saved state ({type(error).__name__}: {reason}).") from error


def _inner(thing: Protectable | PlainValue) -> Protectable:
    if plain_values.is_plain(thing):
        return PlainState(thing)
    return cast(Protectable, unwrapped(thing) if isinstance(thing, nn.Module) else thing)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _shared_moments(name: str, optimizer: torch.optim.Optimizer, parameters: Collection[int]) -> set[str]:
    return {
        f"{name}/state/{number}/{key}"
        for number, parameter in enumerate(_parameters(optimizer))
        if id(parameter) in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }
