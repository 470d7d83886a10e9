"""A digest of a few samples: whether all ranks, in all attempts, train on the same data.

A data set that was split or shuffled without a seed is another one in every process, though it has the same length and
the same sample ids.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.train.data.loader import Dataset
from holdfast.train.state import rng as generators

PROBES = 4
PROBE = "probe"


def probe(dataset: Dataset, count: int, seed: int) -> str:
    """The digest of a few samples, spread over the data set; random augmentation draws the same numbers each time."""
    hasher = xxhash.xxh3_64()
    for index in sorted({i * (count - 1) // (PROBES - 1) for i in range(PROBES)}):
        generators.set_all(generators.key(seed, PROBE, index))
        _add(hasher, dataset[index])
    return str(hasher.hexdigest())


def _add(hasher: Any, value: Any) -> None:
    """Add what a sample holds: numbers, text, arrays and tensors, nested in any way; of anything else its type."""
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
