"""The initial weights of a run: read from another run or a foreign file, matched to the model, and loaded.

Files name weights in many ways: plainly, with a wrapper's prefix (`module.`, `_orig_mod.`), nested in `state_dict` or
`model`. Of these interpretations, the one that matches most names of the model is used. Every rank loads the weights
before the first step, unless it restored a snapshot.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.payload import FlatState, flatten
from holdfast.errors import BadInput
from holdfast.runs.config import WeightsSource
from holdfast.train.state.protected import Protected, digest, listed, own_keys, without_wrappers
from holdfast.weights import read_foreign
from holdfast.weights.export import SAFETENSORS, TORCH
from holdfast.weights.load import SavedStates, from_snapshot
from holdfast.weights.locate import looks_like_run, store_of
from holdfast.weights.stored_tensor import read_all

logger = logging.getLogger(__name__)

INDEX = ".metadata"  # of a DCP folder
DEEPEST = 4  # levels of containers that are searched for weights in a foreign file
_INSIDE = ("state_dict", "model", "model_state_dict", "module")


@dataclass(frozen=True, slots=True, eq=False)
class SourceContent:
    """The content of a weights file or, if `of_a_run`, the states in the snapshot of a run."""

    content: Any
    of_a_run: bool
    digest: str
    step: int | None = None


def resolve(source: WeightsSource) -> WeightsSource:
    """Return `source` completed with the step of its snapshot and the digest of its content."""
    content = read_source(source)
    return replace(source, step=content.step, digest=content.digest)


def read_source(source: WeightsSource) -> SourceContent:
    """Read the run, DCP folder or weights file that `source` names; raise BadInput or Corrupt if it has no weights."""
    path = Path(source.place)
    if path.is_dir():
        if not (path / INDEX).is_file():
            return _read_run(source, path)
        from holdfast.weights.dcp import read_dcp  # a slow import

        return _from_file(path, read_dcp(path))
    if not path.is_file():
        why = "is not a regular file" if path.exists() else "does not exist"
        raise BadInput(f"there are no weights at {path}: it {why}.")
    if path.suffix in SAFETENSORS:
        return _from_file(path, read_foreign.read_safetensors(path))
    if path.suffix in (*TORCH, ".bin", ".ckpt"):
        return _from_file(path, read_foreign.read_torch(path))
    raise BadInput(
        f"{path} has no known format: name a run's folder, a DCP folder, or a file that ends in "
        f"{', '.join((*SAFETENSORS, *TORCH, '.bin', '.ckpt'))}."
    )


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested dicts with its path, such as "model/weight"."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping) and depth < DEEPEST:
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key}" if path else str(key), depth + 1)


def _read_run(source: WeightsSource, path: Path) -> SourceContent:
    if not looks_like_run(path):
        raise BadInput(f"{path} is neither the folder of a run nor a DCP folder: name one, or a weights file.")

    def read(saved: SavedStates) -> tuple[dict[str, Any], dict[str, Any]]:
        others = [name for name in source.take if name not in saved.models]
        return tuple(read_all({name: saved.state(name) for name in names}) for names in (saved.models, others))

    (models, others), step, _ = from_snapshot(store_of(path), source.step, read)
    if not models:
        raise BadInput(f"the run in {path} protects no model: it has no weights to start from.")
    # A single model has the digest of its weights alone, so that it equals the digest of an exported file.
    content = next(iter(models.values())) if len(models) == 1 else models
    tree = flatten(others).extra["state"] if others else None
    flat = FlatState({**dict(tensors_in(content)), **dict(tensors_in(others, "also"))}, {"state": tree})
    return SourceContent({**models, **others}, True, digest(flat), step)


def _from_file(path: Path, content: Any) -> SourceContent:
    tensors = dict(tensors_in(content))
    if not tensors:
        raise BadInput(f"{path} holds no named tensors: it is not a weights file.")
    return SourceContent(content, False, digest(FlatState(dict(tensors), {"state": None})))


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The weights of a file that fit a model, by the model's keys, and all keys that do not match."""

    values: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]

    @property
    def differences(self) -> list[str]:
        """A message for each key that is missing, is unexpected, or has a different shape."""
        missing = [f"{key} is missing" for key in self.missing]
        return [*missing, *self.misshapen, *(f"{key} is unexpected" for key in self.unexpected)]


def match(name: str, model: Mapping[str, Any], content: Mapping[str, Any]) -> Match:
    """Match the weights in `content` to `model`, the state_dict of the model called `name`.

    Keys in `content` may be nested or prefixed; the interpretation that shares most keys with `model` is used.
    """
    keys = dict(zip(own_keys(model), model, strict=True))  # the user's own keys to the model's keys
    best = max(_readings(name, content), key=lambda reading: (len(reading.keys() & keys.keys()), len(reading)))
    misshapen = {key for key in best if key in keys and _shape(best[key]) != _shape(model[keys[key]])}
    return Match(
        {keys[key]: value for key, value in best.items() if key in keys and key not in misshapen},
        [key for key in keys if key not in best],
        [key for key in best if key not in keys],
        [f"{key} has shape {_shape(best[key])}, not {_shape(model[keys[key]])}" for key in sorted(misshapen)],
    )


def _readings(name: str, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    inside = dict.fromkeys((name, *_INSIDE))
    flat = {key: value for key, value in content.items() if isinstance(key, str) and not isinstance(value, Mapping)}
    for reading in (flat, *(content[key] for key in inside if isinstance(content.get(key), Mapping))):
        weights = {str(key): value for key, value in reading.items()}
        yield weights
        yield {without_wrappers(key): value for key, value in weights.items()}
        for prefix in inside:
            inner = {key: value for key, value in weights.items() if key.startswith(f"{prefix}.")}
            yield {without_wrappers(key.removeprefix(f"{prefix}.")): value for key, value in inner.items()}


def _shape(value: Any) -> object:
    return list(value.shape) if isinstance(value, torch.Tensor) else f"of a {type(value).__name__}"


def load_initial_weights(source: WeightsSource, protected: Protected, *, reports: bool = False) -> str:
    """Load the initial states of the protected objects from `source`; return the digest of its content.

    With `reports`, print to stderr what was loaded and, if a partial match is allowed, which keys did not match."""
    content = read_source(source)
    if content.digest != source.digest:
        why = "has changed since this run started from it"
        raise BadInput(f"{source.place} {why}: restore the original, or name another --out.")
    names = source.take or tuple(name for name, thing in protected.things.items() if isinstance(thing, nn.Module))
    if not names:
        raise BadInput(f"no protected model can take the weights of {source.place}: call run.protect(model=model).")
    for name in names:
        if name not in protected.things:
            raise BadInput(f"--init-names has {name!r}, but the script protects {', '.join(protected.things)}.")
        alone = Protected({name: protected.things[name]})
        states = _content_for(name, names, content, source)
        if isinstance(protected.things[name], nn.Module):
            _load_model(name, protected.things[name], states, source, reports=reports)
            continue
        if not content.of_a_run:
            raise BadInput(f"{name} is not a model, and only a run has other states: leave it out of --init-names.")
        if differences := alone.differences(states):
            raise BadInput(f"{name} cannot take its state from {source.place} ({listed(differences)}).")
        alone.restore(states)
    if reports:
        sys.stderr.write(f"holdfast: loaded {', '.join(names)} from {source.place}\n")
    return content.digest


def _content_for(name: str, names: tuple[str, ...], content: SourceContent, source: WeightsSource) -> Mapping[str, Any]:
    states: Mapping[str, Any] = content.content
    if name in states and isinstance(states[name], Mapping):
        return {name: states[name]}
    if len(names) == 1 and not (content.of_a_run and len(states) > 1):
        return states if not content.of_a_run else {name: next(iter(states.values()))}
    has = f"has {', '.join(map(str, states))}" if content.of_a_run else "does not name its models"
    raise BadInput(
        f"{source.place} {has}, and {', '.join(names)} are to take weights from it: choose one with --init-names NAME."
    )


def _load_model(name: str, model: Any, states: Mapping[str, Any], source: WeightsSource, *, reports: bool) -> None:
    before = model.state_dict()
    matched = match(name, before, states)
    if matched.differences and not (source.partial and matched.values):
        raise BadInput(
            f"the weights in {source.place} do not match {name} ({listed(matched.differences)}): use weights of the "
            "same model, or give --init-partial to load the ones that match."
        )
    model.load_state_dict({**before, **matched.values})
    if matched.differences and reports:
        count, total = len(matched.values), len(matched.values) + len(matched.missing) + len(matched.misshapen)
        text = "%s starts with %d of its %d tensors from %s: %s"
        logger.warning(text, name, count, total, source.place, listed(matched.differences))
