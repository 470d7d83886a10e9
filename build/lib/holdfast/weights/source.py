"""Open the source of a run's initial weights: another run, a Hugging Face model, a DCP folder or a weights file.

Opening a source reads only the names, dtypes and shapes of its tensors. Later, each rank reads the parts that it needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast.checkpoint.payload import flatten
from holdfast.checkpoint.stored_tensor import StoredTensor, map_leaves, of_tensor, tensors_in
from holdfast.errors import BadInput
from holdfast.runs.config import WeightsSource
from holdfast.weights.content_digest import content_digest, tabulate, verified
from holdfast.weights.export import SAFETENSORS, TORCH
from holdfast.weights.load import SavedStates, from_snapshot
from holdfast.weights.locate import looks_like_run, store_of
from holdfast.weights.read_foreign import read_torch
from holdfast.weights.read_safetensors import INDEX, read_indexed, read_safetensors

T = TypeVar("T")
DCP_INDEX = ".metadata"
ACCELERATE = "pytorch_model_fsdp_*"  # the DCP folder of the model in a checkpoint of accelerate


@dataclass(frozen=True, slots=True, eq=False)
class SourceContent:
    """Nested dicts of stored tensors: the weights in a file or folder or, if `step` is given, states of a run.

    The digest of the source covers the stored tensors `tensors`, and `others`, which is JSON."""

    states: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    others: Any = None
    step: int | None = None

    @property
    def is_run(self) -> bool:
        return self.step is not None


def resolve(source: WeightsSource) -> WeightsSource:
    """Return `source` completed with the step of its snapshot and the digests of its content. This reads all content."""

    def resolved(content: SourceContent) -> WeightsSource:
        table = tabulate(content.tensors)
        digest = content_digest(content.tensors, table, content.others)
        return replace(source, step=content.step, digest=digest, table=table)

    return from_source(source, resolved)


def verified_content(source: WeightsSource) -> SourceContent:
    """Open a source that `resolve` has completed. A tensor that has changed since then raises BadInput when it is read.

    If `source` lacks the digests of its tensors, all of its content is read to compute them."""
    content = from_source(source, lambda content: content)
    table = source.table or tabulate(content.tensors)

    def changed() -> BadInput:
        why = "has changed since this run started from it"
        return BadInput(f"{source.place} {why}: restore the original, or name another --out.")

    if content_digest(content.tensors, table, content.others) != source.digest:
        raise changed()
    checked = {id(tensor): verified(tensor, table[name], changed) for name, tensor in content.tensors.items()}
    return replace(content, states=map_leaves(content.states, lambda _, value: checked.get(id(value), value)))


def from_source(source: WeightsSource, use: Callable[[SourceContent], T]) -> T:
    """Open a source, and return the result of `use`; raise BadInput or Corrupt if it has no weights.

    If the source is a run and `source.step` is None, use its newest intact snapshot."""
    path = Path(source.place)
    states = _folder_content(path) if path.is_dir() else _file_content(path)
    if states is None:
        return from_snapshot(store_of(path), source.step, lambda saved: use(_of_run(source, saved)))[0]
    return use(_of_file(path, states))


def _folder_content(path: Path) -> Mapping[str, Any] | None:
    """Return the tensors of a DCP folder or Hugging Face model; None if `path` is the folder of a run."""
    indexes = [path / DCP_INDEX] if (path / DCP_INDEX).is_file() else _only(path, f"{ACCELERATE}/{DCP_INDEX}")
    if indexes:
        from holdfast.weights.dcp import read_dcp  # a slow import

        return read_dcp(indexes[0].parent)
    if looks_like_run(path):
        return None
    if indexes := _only(path, f"*{INDEX}"):
        return read_indexed(indexes[0])
    if files := _only(path, "*.safetensors"):
        return read_safetensors(files[0])
    raise BadInput(
        f"{path} is neither the folder of a run nor a DCP folder nor a Hugging Face model: name one, or a weights file."
    )


def _only(path: Path, pattern: str) -> list[Path]:
    """Return a list of the only path that matches `pattern`, or an empty list. Raise BadInput if several paths match."""
    found = sorted(path.glob(pattern))
    if len(found) > 1:
        names = ", ".join(str(place.relative_to(path)) for place in found[:4])
        raise BadInput(f"{path} holds several sets of weights ({names}): name one of them.")
    return found


def _file_content(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        why = "is not a regular file" if path.exists() else "does not exist"
        raise BadInput(f"there are no weights at {path}: it {why}.")
    if path.suffix in SAFETENSORS:
        return read_safetensors(path)
    if path.suffix in (*TORCH, ".bin", ".ckpt"):
        content = read_torch(path)
        stored = map_leaves(content, lambda _, value: of_tensor(value) if isinstance(value, torch.Tensor) else value)
        return stored if isinstance(stored, Mapping) else {}
    raise BadInput(
        f"{path} has no known format: name a run's folder, a DCP folder, a Hugging Face model, or a file that ends in "
        f"{', '.join((*SAFETENSORS, *TORCH, '.bin', '.ckpt'))}."
    )


def _of_file(path: Path, states: Mapping[str, Any]) -> SourceContent:
    tensors = dict(tensors_in(states))
    if not tensors:
        raise BadInput(f"{path} holds no named tensors: it is not a weights file.")
    return SourceContent(states, tensors)


def _of_run(source: WeightsSource, saved: SavedStates) -> SourceContent:
    models = {name: saved.states[name] for name in saved.models}
    others = {name: saved.state(name) for name in source.take if name not in models}
    if not models:
        raise BadInput(f"the run in {source.place} protects no model: it has no weights to start from.")
    # A single model has the digest of its weights alone, so that it equals the digest of an exported file.
    content = next(iter(models.values())) if len(models) == 1 else models
    tensors = {**dict(tensors_in(content)), **dict(tensors_in(others, "also"))}
    plain = map_leaves(others, lambda path, value: path if isinstance(value, StoredTensor) else value)
    tree = flatten(plain).extra["state"] if others else None
    return SourceContent({**models, **others}, tensors, tree, saved.step)
