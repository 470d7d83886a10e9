"""Map-style datasets: their size, and a digest of a few samples, to recognise a dataset."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset

from holdfast.errors import BadInput
from holdfast.train.state import rng

PROBES = 4  # samples whose digest identifies a dataset
PROBE = "probe"


class MapDataset(Protocol):
    """A map-style dataset: it has a length, and a sample for each index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def size(dataset: MapDataset) -> int:
    """Return the number of samples in a dataset; raise BadInput if it has no length or cannot be indexed."""
    try:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError("its samples have no numbers")
        return len(dataset)
    except TypeError as error:
        raise BadInput(
            f"this {type(dataset).__name__} is not a map-style dataset ({error}): give one with __len__ and __getitem__, or "
            "write run.stream(loader, steps=N) if it is a loader with state_dict and load_state_dict."
        ) from error


def probe(dataset: MapDataset, count: int, seed: int) -> str:
    """Return a digest of a few of the dataset's `count` samples, to detect ranks or attempts that have different data.

    A dataset that was split or shuffled without a seed differs in every process. The random generators are seeded from
    `seed` before each sample is read."""
    hasher = xxhash.xxh3_64()
    for index in sorted({i * (count - 1) // (PROBES - 1) for i in range(PROBES)}):
        rng.set_all(rng.key(seed, PROBE, index))
        _add(hasher, dataset[index])
    return str(hasher.hexdigest())


def _add(hasher: Any, value: Any) -> None:
    """Hash the type of `value` and, for numbers, texts, arrays, tensors and nested containers, also the contents."""
    hasher.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        for key, item in value.items():
            hasher.update(str(key).encode())
            _add(hasher, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(hasher, item)
    elif isinstance(value, np.ndarray | np.generic):
        hasher.update(repr((value.dtype.str, value.shape)).encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes | str):
        hasher.update(value if isinstance(value, bytes) else value.encode())
    elif isinstance(value, int | float | complex | None):
        hasher.update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # an image
        hasher.update(value.tobytes())
