"""The things a run protects: anything with `state_dict` and `load_state_dict`, taken, compared and put back exactly."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.state_tree import Flat, flatten
from holdfast.errors import BadInput
from holdfast.train.state import plain_values
from holdfast.train.state.module_names import load_plain, plain_name, plain_state, unwrapped
from holdfast.train.state.plain_values import Plain

Value: TypeAlias = dict[Any, Any] | list[Any] | torch.Tensor | np.ndarray[Any, Any]
"""What is protected by being put back in place."""
SHOWN = 4  # differences that are named; more of them say no more


class Protectable(Protocol):
    """What can be protected: a model, an optimizer, a scheduler, a gradient scaler, or a class of the user's own."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Protected:
    """Named things whose state comes back after a failure. Of a replicated model it is the user's own module."""

    def __init__(self, things: Mapping[str, Protectable | Value]) -> None:
        if not things:
            raise BadInput("protect() was given nothing: name what is to come back, as in protect(model=model)")
        for name, thing in things.items():
            plain_values.check(name, thing)
            if not (
                plain_values.is_plain(thing) or (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"))
            ):
                raise BadInput(
                    f"{name} is a {type(thing).__name__}, without state_dict and load_state_dict: give it both"
                )
        self._things = {name: _inner(thing) for name, thing in things.items()}
        self._groups = self._grouped()

    @property
    def things(self) -> Mapping[str, Protectable]:
        """What is protected, by name."""
        return self._things

    def capture(self) -> dict[str, Any]:
        """The state of every thing; its tensors are the live ones."""
        return {name: _state(thing) for name, thing in self._things.items()}

    def signature(self) -> dict[str, Any]:
        """What the things are, apart from their values: for a model the names, types and shapes of its tensors."""
        return {name: _signature(thing) for name, thing in self._things.items()}

    def own(self) -> dict[str, str]:
        """The plain values, which may be this rank's own, as text."""
        return {
            name: plain_values.spoken(name, each.state_dict()) for name, each in self._things.items() if _is_own(each)
        }

    def restore_own(self, saved: Mapping[str, str]) -> dict[str, Any]:
        """Put this rank's own plain values back; the states that they have then."""
        states = {name: plain_values.heard(name, text) for name, text in saved.items()}
        for name, state in states.items():
            _restore(self._things[name], state)
        return states

    @property
    def models(self) -> list[nn.Module]:
        """Those of the things that are models."""
        return [thing for thing in self._things.values() if isinstance(thing, nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the things that are optimizers."""
        return [thing for thing in self._things.values() if isinstance(thing, torch.optim.Optimizer)]

    def check_groups(self) -> None:
        """Refuse to save an optimizer that was given more parameters since: a script that begins anew cannot load it."""
        for name, now in self._grouped().items():
            if now != (before := self._groups[name]):
                raise BadInput(
                    f"{name} has groups of {now} parameters, and had {before} when it was protected: after a failure its "
                    "state could not be loaded. Give it all its groups at the beginning, with a learning rate of 0 for "
                    "those that wait"
                )

    def _grouped(self) -> dict[str, list[int]]:
        """How many parameters each group of each optimizer has."""
        return {
            name: [len(group["params"]) for group in thing.param_groups]
            for name, thing in self._things.items()
            if isinstance(thing, torch.optim.Optimizer)
        }

    def check_covers(self, model: nn.Module) -> None:
        """Refuse to train a replicated model that would start anew after a failure."""
        saved = {tensor.data_ptr() for tensor in flatten(self.capture()).tensors.values() if _is_tensor(tensor)}
        lost = [name for name, each in model.named_parameters() if each.numel() and each.data_ptr() not in saved]
        if lost:
            raise BadInput(
                f"a replicated {type(model).__name__} is not protected ({listed(lost)}): name it in protect(), as in "
                "protect(model=model), or it would begin anew after a failure"
            )

    def check_trainer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that trains a protected model and would begin anew after a failure."""
        models = {id(each) for model in self.models for each in model.parameters()}
        covered = {id(each) for mine in self.optimizers for each in _parameters(mine)}
        if not self._is_opaque and any(id(each) in models - covered for each in _parameters(optimizer)):
            raise BadInput(
                f"{type(optimizer).__name__} trains a protected model and is not protected: name it in protect(), as in "
                "protect(model=model, optimizer=optimizer), or it would begin anew after a failure"
            )

    def check_replicated(self, replicated: Iterable[nn.Module]) -> None:
        """Refuse to train parameters that are each rank's own: no survivor has those of a rank that is lost."""
        shared = {id(each) for model in replicated for each in model.parameters()}
        for name, thing in self._things.items():
            if isinstance(thing, torch.optim.Optimizer) and any(id(each) not in shared for each in _parameters(thing)):
                raise BadInput(
                    f"{name} trains parameters of a model that is not replicated, and live recovery needs every rank to "
                    "have the same: write model = run.replicate(model) before the optimizer is made, or choose "
                    "--recovery restart"
                )

    def check_schedules(self) -> None:
        """Refuse a learning-rate schedule that would begin anew after a failure."""
        covered = {id(thing.optimizer) for thing in self._things.values() if isinstance(thing, LRScheduler)}
        for name, thing in self._things.items():
            # A schedule wraps the step of its optimizer, to see whether it is called before its own.
            scheduled = isinstance(thing, torch.optim.Optimizer) and hasattr(thing.step, "_wrapped_by_lr_sched")
            if scheduled and id(thing) not in covered and not self._is_opaque:
                raise BadInput(
                    f"{name} has a learning-rate scheduler that is not protected: name it in protect(), as in "
                    "protect(..., scheduler=scheduler), or it would begin anew after a failure"
                )

    @property
    def _is_opaque(self) -> bool:
        """Whether one of the things is the user's own, and may hold any other."""
        known = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, Plain)
        return not all(isinstance(thing, known) for thing in self._things.values())

    @property
    def is_scaled(self) -> bool:
        """Whether a gradient scaler stands between gradients and optimizers."""
        return any(isinstance(thing, torch.amp.GradScaler) and thing.is_enabled() for thing in self._things.values())

    def digest(self) -> str:
        """A digest of the state of all things, every bit of it, as it is in memory."""
        return digest(flatten(self.capture()))

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Where a saved state cannot be that of these things, each in a few words."""
        return [
            *(f"{name} was not protected" for name in self._things if name not in saved),
            *(f"{name} is no longer protected" for name in saved if name not in self._things),
            *(
                f"{name}{difference}"
                for name, thing in self._things.items()
                if name in saved
                for difference in _differences(thing, saved[name])
            ),
        ]

    def trained(self) -> dict[str, Any]:
        """What a step changes by its gradients: parameters, and the states of optimizers and gradient scalers."""
        return {name: _trained(thing) for name, thing in self._things.items() if _is_trained(thing)}

    def take_over(self, trained: Mapping[str, Any]) -> None:
        """Have what another rank has after the same step; all else is this rank's own."""
        for name, state in trained.items():
            _restore(self._things[name], {**_state(self._things[name]), **state})

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put a saved state back, bit by bit; nothing of it is shared with the things afterwards."""
        for name, thing in self._things.items():
            try:
                _restore(thing, saved[name])
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                reason = " ".join(str(error).split())
                raise BadInput(
                    f"{name} does not take its saved state back ({type(error).__name__}: {reason})"
                ) from error


def digest(flat: Flat) -> str:
    """A digest of a state that was taken apart; it does not depend on where or in which order its tensors lie."""
    hasher = xxhash.xxh3_128(tree_digest(flat).encode())
    for name in sorted(flat.tensors):
        value = torch.as_tensor(flat.tensors[name]).detach()
        hasher.update(repr((name, value.dtype, tuple(value.shape))).encode())
        if value.numel():
            hasher.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


def tree_digest(flat: Flat) -> str:
    """A digest of everything in a state but its tensors."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(flat.extra["state"]).encode()))


def listed(differences: list[str]) -> str:
    """Differences in one line; of many the first few."""
    rest = len(differences) - SHOWN
    return "; ".join(differences[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _state(thing: Protectable) -> Mapping[str, Any]:
    return plain_state(thing) if isinstance(thing, nn.Module) else thing.state_dict()


def _is_own(thing: Protectable) -> bool:
    return isinstance(thing, Plain)


def _inner(thing: Protectable | Value) -> Protectable:
    if plain_values.is_plain(thing):
        return Plain(thing)
    return cast(Protectable, unwrapped(thing) if isinstance(thing, nn.Module) else thing)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _signature(thing: Protectable) -> Any:
    if isinstance(thing, nn.Module):
        return {key: _kind(value) for key, value in plain_state(thing).items() if isinstance(value, torch.Tensor)}
    return type(thing).__name__


def _differences(thing: Protectable, saved: Any) -> list[str]:
    try:
        if isinstance(thing, nn.Module):
            return _of_model(_signature(thing), saved)
        return _of_optimizer(thing, saved) if isinstance(thing, torch.optim.Optimizer) else []
    except (KeyError, TypeError, AttributeError):  # a stranger's state may be of any form
        return [" was something else"]


def _of_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[str]:
    now = [len(group["params"]) for group in optimizer.param_groups]
    before = [len(group["params"]) for group in saved["param_groups"]]
    return [] if now == before else [f" has groups of {now} parameters, not {before}"]


def _of_model(now: Mapping[str, str], saved: Mapping[str, Any]) -> list[str]:
    before = {plain_name(key): _kind(value) for key, value in saved.items() if isinstance(value, torch.Tensor)}
    return [
        *(f".{key} is {now[key]}, not {kind}" for key, kind in before.items() if key in now and now[key] != kind),
        *(f".{key} is new" for key in now if key not in before),
        *(f".{key} is gone" for key in before if key not in now),
    ]


def _is_trained(thing: Protectable) -> bool:
    return isinstance(thing, nn.Module | torch.optim.Optimizer | torch.amp.GradScaler)


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
    """Optimizers cast their state to the type of the parameter when they load it, which may round it: undo that."""
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], before["params"], strict=True):
            for key, value in saved["state"].get(number, {}).items():
                now = optimizer.state[parameter][key]
                if isinstance(value, torch.Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(now.device)


def _copied(value: Any) -> Any:
    """The same state in memory of its own: what was read lies in one buffer, and would be kept whole for a part."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
