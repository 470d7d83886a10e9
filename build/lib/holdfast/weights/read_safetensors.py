"""Read safetensors files of other programs without trusting them: one file, or the files of a Hugging Face model."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast import memory
from holdfast.checkpoint import payload
from holdfast.checkpoint.payload import Entry
from holdfast.checkpoint.sharding import Box, within
from holdfast.checkpoint.store import refusal
from holdfast.checkpoint.stored_tensor import StoredTensor
from holdfast.errors import Corrupt

INDEX = ".safetensors.index.json"  # ends the name of the file that lists the files of a model
_LONGEST = 256 << 20  # bytes of an index


def read_safetensors(path: Path, first: int = 0) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file; raise Corrupt if it is malformed.

    Each tensor has a position in the order of reading. `first` is the position of the first tensor."""
    try:
        length = path.stat().st_size
        entries = payload.read_header(partial(_read_bytes, path), length, str(path))
    except OSError as error:
        raise refusal("read", path, error) from error
    names = sorted(entries, key=lambda name: entries[name].start)
    positions = {name: first + number for number, name in enumerate(names)}
    return {name: _stored(path, entry, positions[name]) for name, entry in entries.items()}


def read_indexed(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files listed in `index`, a Hugging Face model's index file; raise Corrupt on damage."""
    files = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    contents: dict[str, dict[str, StoredTensor]] = {}
    for name in dict.fromkeys(files.values()):
        contents[name] = read_safetensors(index.parent / name, sum(map(len, contents.values())))
    for key, name in files.items():
        if key not in contents[name]:
            raise Corrupt(f"{index} says that {key!r:.200} is in {name}, which lacks it: copy the model again.")
        tensors[key] = contents[name][key]
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST} bytes")
        files: Any = json.loads(index.read_bytes())["weight_map"]
        if far := [name for name in files.values() if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ValueError(f"{far[0]!r:.200} is not a safetensors file beside it")
        return dict(files)
    except OSError as error:
        raise refusal("read", index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{index} is not an index of safetensors files ({error!r:.200}): copy it again.") from error


def _stored(path: Path, entry: Entry, position: int) -> StoredTensor:
    return StoredTensor(payload.torch_dtype(entry.dtype), tuple(entry.shape), partial(_read, path, entry), position)


def _read(path: Path, entry: Entry, box: Box) -> torch.Tensor:
    """Return the values of a tensor inside `box`. Read only the rows of the box."""
    if not box:  # a number
        return payload.as_tensor(payload.as_array(_read_bytes(path, entry.start, entry.end), entry, ()))
    first, last = box[0]
    row = (entry.end - entry.start) // max(1, entry.shape[0])
    data = _read_bytes(path, entry.start + first * row, entry.start + last * row)
    rows = payload.as_tensor(payload.as_array(data, entry, (last - first, *entry.shape[1:])))
    return rows[(slice(None), *within(box[1:], tuple((0, size) for size in entry.shape[1:])))]


def _read_bytes(path: Path, start: int, stop: int) -> npt.NDArray[np.uint8]:
    memory.require(str(path), stop - start)
    data = np.empty(stop - start, np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            filled = 0
            while filled < len(data):
                count = file.readinto(data.data[filled:])
                if not count:
                    raise Corrupt(f"{path} ends at byte {start + filled}, and {stop} were expected: copy it again.")
                filled += count
    except OSError as error:
        raise refusal("read", path, error) from error
    return data
