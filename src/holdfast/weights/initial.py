"""What a source of weights gives: the states of another run by name, or what a foreign file holds.

Which of the weights at hand are those of a model, by their names and shapes. Pure.

Files name weights in many ways: as they are, after what a wrapper puts before them (`module.`, `_orig_mod.`), inside of
`state_dict` or `model`, flat or nested. Of these ways the one counts that meets most names of the model.

The first weights of a run, taken from its source: by every rank, before the first step, unless a snapshot came back.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.state_tree import Flat, flatten
from holdfast.errors import BadInput
from holdfast.runs.config import WeightsSource
from holdfast.train.state.module_names import own_keys, without_wrappers
from holdfast.train.state.protected import Protected, digest, listed
from holdfast.weights import read_foreign
from holdfast.weights.export import SAFETENSORS, TORCH
from holdfast.weights.load import learned_by
from holdfast.weights.locate import is_run

INDEX = ".metadata"  # of a DCP folder
DEEPEST = 4  # levels of containers in a foreign file in which weights are looked for


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What was read: states by name if it is of a run, else whatever a file holds; and which snapshot it was."""

    content: Any
    of_a_run: bool
    digest: str
    step: int | None = None


def settled(source: WeightsSource) -> WeightsSource:
    """The same source with what it gives now on record: which snapshot of a run, and a digest."""
    given = read(source)
    return replace(source, step=given.step, digest=given.digest)


def read(source: WeightsSource) -> Given:
    """Everything that a source gives; refused if it is no source of weights, or is damaged."""
    path = Path(source.place)
    if path.is_dir():
        return _of_dcp(path) if (path / INDEX).is_file() else _of_run(source, path)
    if not path.is_file():
        why = "is no regular file" if path.exists() else "does not exist"
        raise BadInput(f"there are no weights at {path}: it {why}.")
    if path.suffix in SAFETENSORS:
        return _of_file(path, read_foreign.read_safetensors(path))
    if path.suffix in (*TORCH, ".bin", ".ckpt"):
        return _of_file(path, read_foreign.read_torch(path))
    raise BadInput(
        f"{path} does not say its format: name a run's folder, a folder of DCP, or a file that ends in "
        f"{', '.join((*SAFETENSORS, *TORCH, '.bin', '.ckpt'))}."
    )


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested containers, by its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping) and depth < DEEPEST:
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key}" if path else str(key), depth + 1)


def _of_run(source: WeightsSource, path: Path) -> Given:
    if not is_run(path):
        raise BadInput(f"{path} is neither the folder of a run nor one of DCP: name one, or a file of weights.")
    learned = learned_by(path, source.step)
    models = {name: learned.states[name] for name in learned.models}
    others = {name: learned.named(name) for name in source.take if name not in models}
    if not models:
        raise BadInput(f"the run in {path} protects no model: there are no weights to begin with.")
    # One model alone has the digest of its weights, whichever file it is exported to.
    content = next(iter(models.values())) if len(models) == 1 else models
    tree = flatten(others).extra["state"] if others else None
    flat = Flat({**dict(tensors_in(content)), **dict(tensors_in(others, "also"))}, {"state": tree})
    return Given({**models, **others}, True, digest(flat), learned.step)


def _of_dcp(path: Path) -> Given:
    from holdfast.weights.dcp import read_dcp  # it takes a while to import

    return _of_file(path, read_dcp(path))


def _of_file(path: Path, content: Any) -> Given:
    found = dict(tensors_in(content))
    if not found:
        raise BadInput(f"{path} holds no tensors by name: it is no file of weights.")
    return Given(content, False, digest(Flat(dict(found), {"state": None})))


_INSIDE = ("state_dict", "model", "model_state_dict", "module")


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What a source has for a model: values by the model's own keys, and where the two differ, each in a few words."""

    values: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]

    @property
    def differences(self) -> list[str]:
        """All of them."""
        missing = [f"{key} is missing" for key in self.missing]
        return [*missing, *self.misshapen, *(f"{key} is unexpected" for key in self.unexpected)]


def fit(name: str, model: Mapping[str, Any], content: Mapping[str, Any]) -> Fit:
    """How the weights in this content fit the model of this name and state_dict, read in the way that fits best."""
    keys = dict(zip(own_keys(model), model, strict=True))  # the user's own, and the model's
    best = max(_readings(name, content), key=lambda found: (len(found.keys() & keys.keys()), len(found)))
    misshapen = {key for key in best if key in keys and not _same_shape(best[key], model[keys[key]])}
    return Fit(
        {keys[key]: value for key, value in best.items() if key in keys and key not in misshapen},
        [key for key in keys if key not in best],
        [key for key in best if key not in keys],
        [f"{key} has shape {_shape(best[key])}, not {_shape(model[keys[key]])}" for key in sorted(misshapen)],
    )


def _readings(name: str, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The ways to read the content as weights by name: the plainest first."""
    inside = dict.fromkeys((name, *_INSIDE))
    flat = {key: value for key, value in content.items() if isinstance(key, str) and not isinstance(value, Mapping)}
    for reading in (flat, *(content[key] for key in inside if isinstance(content.get(key), Mapping))):
        weights = {str(key): value for key, value in reading.items()}
        yield weights
        yield {without_wrappers(key): value for key, value in weights.items()}
        for prefix in inside:
            yield {
                without_wrappers(key.removeprefix(f"{prefix}.")): value
                for key, value in weights.items()
                if key.startswith(f"{prefix}.")
            }


def _same_shape(one: Any, other: Any) -> bool:
    return _shape(one) == _shape(other)


def _shape(value: Any) -> object:
    return list(value.shape) if isinstance(value, torch.Tensor) else f"of a {type(value).__name__}"


logger = logging.getLogger(__name__)


def take(source: WeightsSource, protected: Protected, *, tells: bool = False) -> str:
    """Give the protected things their first states, and return the digest of what the source gave.

    `tells`, of one of the ranks, has it say what a partial source left as it was.
    """
    given = read(source)
    if given.digest != source.digest:
        raise BadInput(
            f"{source.place} is not what it was when this run began with it: bring that back, or name another --out."
        )
    names = source.take or tuple(name for name, thing in protected.things.items() if isinstance(thing, nn.Module))
    if not names:
        raise BadInput(f"no model is protected that could take the weights of {source.place}: protect(model=model).")
    for name in names:
        _give(name, _known(name, protected), _content(name, names, given, source), given, source, tells=tells)
    return given.digest


def _known(name: str, protected: Protected) -> Protected:
    """What is protected under this name, by itself."""
    if name not in protected.things:
        raise BadInput(
            f"nothing named {name!r} is protected that could take a state: {', '.join(protected.things)} are."
        )
    return Protected({name: protected.things[name]})


def _content(name: str, names: tuple[str, ...], given: Given, source: WeightsSource) -> Mapping[str, Any]:
    """The part of the source that is meant for this thing."""
    content: Mapping[str, Any] = given.content
    if name in content and isinstance(content[name], Mapping):
        return {name: content[name]}
    if len(names) == 1 and not (given.of_a_run and len(content) > 1):
        return content if not given.of_a_run else {name: next(iter(content.values()))}
    has = f"has {', '.join(map(str, content))}" if given.of_a_run else "does not name its models"
    raise BadInput(
        f"{source.place} {has}, and {', '.join(names)} are to take weights from it: say which with --init-names NAME."
    )


def _give(
    name: str, alone: Protected, content: Mapping[str, Any], given: Given, source: WeightsSource, *, tells: bool
) -> None:
    thing = alone.things[name]
    if not isinstance(thing, nn.Module):
        if not given.of_a_run:
            raise BadInput(f"{name} is no model, and only a run has states of others: leave it out of --init-names.")
        if differences := alone.differences(content):
            raise BadInput(f"{name} cannot take its state from {source.place} ({listed(differences)}).")
        alone.restore(content)
        return
    before = thing.state_dict()
    found = fit(name, before, content)
    if found.differences and not (source.partial and found.values):
        raise BadInput(
            f"the weights in {source.place} are not those of {name} ({listed(found.differences)}): take those of the "
            "same model, or give --init-partial to begin with what fits."
        )
    thing.load_state_dict({**before, **found.values})
    if found.differences and tells:
        _tell(name, found, source)


def _tell(name: str, found: Fit, source: WeightsSource) -> None:
    logger.warning(
        "%s begins with %d of its %d tensors from %s: %s",
        name,
        len(found.values),
        len(found.values) + len(found.missing) + len(found.misshapen),
        source.place,
        listed(found.differences),
    )
