"""Marks of values for a rehearsal (a test run with planned kills): short texts that are equal only for equal values.

A cheap mark covers only a sample of the values of a large tensor.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.train.state.shards import local

WHOLE = 1 << 16  # values; of a larger tensor a cheap mark samples FEW
FEW = 64
LONGEST = 60  # characters of a plain value
_PLACE = re.compile(r" at 0x[0-9a-f]+")  # an address is not part of the value


def mark(value: Any, *, cheap: bool = False) -> str:
    """Return a short text that describes `value`: equal texts mean equal values.

    If `cheap`, only some elements of a large tensor or array are compared."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(local(value.detach()), cheap)
    if isinstance(value, np.ndarray | np.generic):
        return _of_array(np.asarray(value), cheap)
    if isinstance(value, str | bytes) and len(value) > LONGEST:
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return f"{type(value).__name__} of {len(value)} {_digest(data)}"
    text = _PLACE.sub("", repr(value))
    return text if len(text) <= LONGEST else f"{text[:20]}... {_digest(text.encode())}"


def marks(state: Any, *, cheap: bool = False) -> dict[str, str]:
    """Return the result of `mark` for every leaf of the nested `state`, by path."""
    return {path: mark(value, cheap=cheap) for path, value in leaves(state)}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every leaf of nested dicts, lists and tuples. `path` is the path of `state` itself."""
    if isinstance(state, Mapping):
        items: Any = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        yield path, state
        return
    for key, value in items:
        yield from leaves(value, f"{path}/{key}" if path else str(key))


def of_generator(generator: Any) -> str:
    """Return a digest of the state of a random generator of Python, numpy or torch."""
    state = generator_state(generator)
    values = [(path, value.tolist() if hasattr(value, "tolist") else value) for path, value in leaves(state)]
    return _digest(repr(values).encode())


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator of Python, numpy or torch, as its own methods return it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.state


def _of_tensor(value: torch.Tensor, cheap: bool) -> str:
    about = f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.layout != torch.strided or value.is_meta:
        return f"{about} {value.layout}"
    if value.numel() and not value.untyped_storage().nbytes():
        return f"{about} freed"  # its owner will resize its storage, which numpy would prevent
    if cheap and value.numel() > WHOLE:
        flat = value.reshape(-1)
        value = flat[torch.linspace(0, value.numel() - 1, FEW, dtype=torch.float64).long().to(flat.device)]
    plain = value.cpu().contiguous().reshape(-1)
    return f"{about} {_digest(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b'')}"


def _of_array(value: np.ndarray[Any, Any], cheap: bool) -> str:
    about = f"tensor numpy {value.dtype}{list(value.shape)}"
    if value.dtype.hasobject:
        return about
    few = value.reshape(-1)[np.linspace(0, value.size - 1, FEW).astype(int)] if cheap and value.size > WHOLE else value
    return f"{about} {_digest(np.ascontiguousarray(few).tobytes())}"


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))
