"""The initial weights of a run: matched to the model by their names, and loaded. Each rank reads only its own shards.

Files name weights in many ways: plainly, with a wrapper's prefix (`module.`, `_orig_mod.`), or nested in `state_dict` or
`model`. All these interpretations are tried, and the best match with the names in the model is used. Every rank loads
the weights before the first step, unless it restored a snapshot.
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.payload import flatten
from holdfast.checkpoint.sharding import is_empty
from holdfast.checkpoint.stored_tensor import StoredTensor, map_leaves
from holdfast.errors import BadInput
from holdfast.runs.config import WeightsSource
from holdfast.train.state.differences import listed
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import held_box, local, read_as_held
from holdfast.train.state.unwrapped_models import unwrapped_key, unwrapped_state
from holdfast.weights.source import SourceContent, verified_content

logger = logging.getLogger(__name__)

_INSIDE = ("state_dict", "model", "model_state_dict", "module")
_BESIDE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")  # other states in a checkpoint of torchtitan


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The weights in a file that fit a model, by the model's keys, and all keys that do not match."""

    values: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    misfits: list[str]

    @property
    def differences(self) -> list[str]:
        """A message for each key that is missing or unexpected, or whose tensor has another shape or kind of numbers."""
        missing = [f"{key} is missing" for key in self.missing]
        return [*missing, *self.misfits, *(f"{key} is unexpected" for key in self.unexpected)]


def match(
    name: str, model: Mapping[str, Any], content: Mapping[str, Any], tied: Collection[Collection[str]] = ()
) -> Match:
    """Match the weights in `content` to `model`, the state_dict of the model called `name`.

    Keys in `content` may be nested or prefixed; the interpretation that shares most keys with `model` is used. Each
    group of keys in `tied` stands for a single parameter of the model, so `content` needs only one key of the group."""
    keys = dict(zip(unwrapped_state(model), model, strict=True))  # the user's own keys to the model's keys
    readings = _readings(name, content, keys)
    best = max(readings, key=lambda reading: (len(reading.keys() & keys.keys()), len(reading)))
    best = _with_tied(best, {key: own for own, key in keys.items()}, tied)
    misfits = {key: _misfit(value, model[keys[key]]) for key, value in best.items() if key in keys}
    misfits = {key: why for key, why in misfits.items() if why}
    return Match(
        {keys[key]: value for key, value in best.items() if key in keys and key not in misfits},
        [key for key in keys if key not in best],
        [key for key in best if key not in keys],
        [f"{key} {misfits[key]}" for key in sorted(misfits)],
    )


def _readings(name: str, content: Mapping[str, Any], keys: Collection[str]) -> Iterator[dict[str, Any]]:
    inside = dict.fromkeys((name, *_INSIDE))
    beside = tuple(prefix for prefix in _BESIDE if not any(key.startswith(prefix) for key in keys))
    flat = {key: value for key, value in content.items() if isinstance(key, str) and not isinstance(value, Mapping)}
    flat = {key: value for key, value in flat.items() if not key.startswith(beside)}
    for reading in (flat, *(content[key] for key in inside if isinstance(content.get(key), Mapping))):
        weights = {str(key): value for key, value in reading.items()}
        yield weights
        yield {unwrapped_key(key): value for key, value in weights.items()}
        for prefix in inside:
            inner = {key: value for key, value in weights.items() if key.startswith(f"{prefix}.")}
            yield {unwrapped_key(key.removeprefix(f"{prefix}.")): value for key, value in inner.items()}


def _with_tied(reading: dict[str, Any], own: Mapping[str, str], tied: Collection[Collection[str]]) -> dict[str, Any]:
    """Return `reading`, completed so that each tied parameter with at least one of its keys has all of them.

    `own` maps keys of the model to the user's own keys, which `reading` uses."""
    for group in tied:
        names = [own[key] for key in group if key in own]
        if present := [key for key in names if key in reading]:
            reading = {**dict.fromkeys(names, reading[present[0]]), **reading}
    return reading


def _misfit(value: Any, target: Any) -> str | None:
    """Return the reason why a value cannot be loaded into the model's `target`; None if it can.

    The precision may differ, because torch converts it. Integers do not fit floating-point parameters, or vice versa."""
    if _shape(value) != _shape(target):
        return f"has shape {_shape(value)}, not {_shape(target)}"
    if isinstance(target, torch.Tensor) and _number_kind(value.dtype) != _number_kind(target.dtype):
        return f"has dtype {_name(value.dtype)}, not {_name(target.dtype)}"
    return None


def _shape(value: Any) -> object:
    is_tensor = isinstance(value, torch.Tensor | StoredTensor)
    return list(value.shape) if is_tensor else f"of a {type(value).__name__}"


def _number_kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_initial_weights(source: WeightsSource, protected: Protected, *, rank: int = 0, reports: bool = False) -> str:
    """Load the initial states of the protected objects of `rank` from `source`; return the digest of its content.

    With `reports`, print to stderr what was loaded and, if a partial match is allowed, which keys did not match."""
    content = verified_content(source)
    names = source.take or tuple(name for name, thing in protected.things.items() if isinstance(thing, nn.Module))
    if not names:
        raise BadInput(f"no protected model can take the weights of {source.place}: call run.protect(model=model).")
    for name in names:
        if name not in protected.things:
            raise BadInput(f"--init-names has {name!r}, but the script protects {', '.join(protected.things)}.")
        states = _content_for(name, names, content, source)
        if isinstance(model := protected.things[name], nn.Module):
            _load_model(name, model, states, source, rank, reports=reports)
            continue
        if not content.is_run:
            raise BadInput(f"{name} is not a model, and only a run has other states: leave it out of --init-names.")
        _load_other(Protected({name: protected.things[name]}), states, source, rank)
    if reports:
        sys.stderr.write(f"holdfast: loaded {', '.join(names)} from {source.place}\n")
    return source.digest


def _content_for(name: str, names: tuple[str, ...], content: SourceContent, source: WeightsSource) -> Mapping[str, Any]:
    states = content.states
    if name in states and isinstance(states[name], Mapping):
        return {name: states[name]}
    if len(names) == 1 and not (content.is_run and len(states) > 1):
        return states if not content.is_run else {name: next(iter(states.values()))}
    has = f"has {', '.join(map(str, states))}" if content.is_run else "does not name its models"
    raise BadInput(
        f"{source.place} {has}, and {', '.join(names)} are to take weights from it: choose one with --init-names NAME."
    )


def _load_model(
    name: str, model: nn.Module, states: Mapping[str, Any], source: WeightsSource, rank: int, *, reports: bool
) -> None:
    state = model.state_dict()
    matched = match(name, state, states, _tied(model))
    if matched.differences and not (source.partial and matched.values):
        raise BadInput(
            f"the weights in {source.place} do not match {name} ({listed(matched.differences)}): use weights of the "
            "same model, or give --init-partial to load the ones that match."
        )
    for key, value in sorted(matched.values.items(), key=lambda pair: getattr(pair[1], "position", 0)):
        if isinstance(value, StoredTensor):
            _fill(state[key], value, rank)
        else:
            state[key] = value
    model.load_state_dict(state)
    if matched.differences and reports:
        count, total = len(matched.values), len(matched.values) + len(matched.missing) + len(matched.misfits)
        text = "%s starts with %d of its %d tensors from %s: %s"
        logger.warning(text, name, count, total, source.place, listed(matched.differences))


def _tied(model: nn.Module) -> list[list[str]]:
    """Return groups of names in a model. All names in a group belong to a single parameter (tied weights)."""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for key, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(key)
    return [names for names in groups.values() if len(names) > 1]


def _fill(target: torch.Tensor, stored: StoredTensor, rank: int) -> None:
    """Read the values of `target` that this rank holds: all of them, or only those of its shard."""
    box = held_box(target, rank)
    if not is_empty(box):
        with torch.no_grad():
            local(target).copy_(torch.as_tensor(stored.read_part(box)))


def _load_other(protected: Protected, states: Mapping[str, Any], source: WeightsSource, rank: int) -> None:
    """Load the state of an object that is not a model. Each rank reads only its shards of distributed tensors."""
    held = flatten(protected.capture()).tensors

    def read(path: str, value: Any) -> Any:
        if not isinstance(value, StoredTensor):
            return value
        return read_as_held(value, held.get(path), protected.parameter_of(path), rank)

    read_states = map_leaves(states, read)
    if differences := protected.differences(read_states):
        raise BadInput(f"{', '.join(states)} cannot take its state from {source.place} ({listed(differences)}).")
    protected.restore(read_states)
