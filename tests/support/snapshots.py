"""Small snapshots to save, compare and damage."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.blocks.division import Array
from holdfast.checkpoint import payload, retention, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.sharding import Sharding, within
from holdfast.checkpoint.snapshot import PassedOver, Snapshot, SnapshotDraft
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.writer import Writer, alone

STEP_FILES = ("shard-00000-of-00001.safetensors", "extra.json", "manifest.json")


def tensors_of(step: int) -> dict[str, Array]:
    return {
        "weight": torch.full((3, 2), float(step), dtype=torch.bfloat16),
        "columns": torch.arange(6.0).reshape(2, 3).t(),
        "scalar": torch.tensor(step, dtype=torch.float64),
        "nothing": torch.zeros(0, 4),
        "array": np.arange(3, dtype=np.int32) * step,
        "flags": np.array([[True, False]]),
        "empty": np.zeros((2, 0), np.float32),
    }


def saved(store: Store, *steps: int) -> Store:
    for step in steps:
        snapshot.save(store, step, tensors_of(step), {"step": step})
    return store


def saved_by(store: Store, step: int, count: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """Save a snapshot of which `count` ranks write equal parts of the rows, one file each."""
    rows = {name: Sharding((count,), ((0, 0),) if value.ndim else ()) for name, value in tensors.items()}
    whole = snapshot.undivided(tensors)
    layout = {name: replace(whole[name], sharding=rows[name]) for name in tensors}
    shards = []
    for rank in range(count):
        boxes = {name: layout[name].box(rank) for name in tensors}
        parts = {name: tensors[name][within(box, whole[name].whole)] for name, box in boxes.items() if box is not None}
        shards.append(snapshot.write_shard(store, step, payload.encode(parts, digests=True), rank=rank, count=count))
    return snapshot.commit(store, snapshot.draft(step, {"step": step}, layout, world=count), shards)


def draft_of(step: int, tensors: Mapping[str, Array], extra: Mapping[str, Any], **position: Any) -> SnapshotDraft:
    """Return everything but the tensors of a snapshot that one process saves."""
    return snapshot.draft(step, extra, snapshot.undivided(tensors), **position)


def save_alone(
    writer: Writer, step: int, tensors: Mapping[str, Array], extra: Mapping[str, Any], **position: Any
) -> None:
    """Start to save a state with a writer, as the only rank."""
    writer.save(step, tensors, alone(step, tensors, extra, **position))


def written(store: Store, step: int, tensors: Mapping[str, Array]) -> list[Digest]:
    """Write the only shard file of a snapshot; return what `snapshot.commit` needs of it."""
    return [snapshot.write_shard(store, step, payload.encode(tensors, digests=True))]


def resume(store: Store) -> tuple[Snapshot | None, tuple[PassedOver, ...]]:
    """Return the newest good snapshot in memory, and set the bad ones aside, as a run does at its start."""
    return retention.resume(store, lambda step: snapshot.load(store, step))


def same(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return list(a) == list(b) and all(
        type(a[name]) is type(b[name])
        and a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        # By bytes, so that NaN equals NaN.
        and _bytes(a[name]) == _bytes(b[name])
        for name in a
    )


def _bytes(value: Array) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value.tobytes()


def damage(store: Store, name: str, data: bytes | None) -> None:
    """Replace stored bytes without updating the manifest; None removes them."""
    store.remove(name)
    if data is not None:
        store.put(name, [data])


def put_byte(path: Path, position: int, byte: int) -> None:
    """Change one byte in place, which is much cheaper than writing the whole file again."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([byte]))
