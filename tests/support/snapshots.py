"""Small snapshots to save, compare and damage."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from holdfast.blocks.division import Array
from holdfast.checkpoint import snapshot
from holdfast.checkpoint.store import Store

STEP_FILES = ("state.safetensors", "extra.json", "manifest.json")


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
