"""What a source of weights gives: the states of another run by name, or what a foreign file holds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.state_tree import Flat, flatten
from holdfast.errors import BadInput
from holdfast.runs.source import Source
from holdfast.train.state.protected import digest
from holdfast.weights import read_foreign as foreign
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


def settled(source: Source) -> Source:
    """The same source with what it gives now on record: which snapshot of a run, and a digest."""
    given = read(source)
    return replace(source, step=given.step, digest=given.digest)


def read(source: Source) -> Given:
    """Everything that a source gives; refused if it is no source of weights, or is damaged."""
    path = Path(source.place)
    if path.is_dir():
        return _of_dcp(path) if (path / INDEX).is_file() else _of_run(source, path)
    if not path.is_file():
        why = "is no regular file" if path.exists() else "does not exist"
        raise BadInput(f"there are no weights at {path}: it {why}.")
    if path.suffix in SAFETENSORS:
        return _of_file(path, foreign.read_safetensors(path))
    if path.suffix in (*TORCH, ".bin", ".ckpt"):
        return _of_file(path, foreign.read_torch(path))
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


def _of_run(source: Source, path: Path) -> Given:
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
