"""Write stored tensors as safetensors, one tensor at a time: a single file, or the files of a Hugging Face model."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.checkpoint import payload
from holdfast.checkpoint.stored_tensor import StoredTensor
from holdfast.errors import BadInput

METADATA = {"format": "pt"}  # transformers asks for it


def write_file(state: Mapping[str, Any], path: Path) -> None:
    """Write a state_dict of stored tensors to a safetensors file."""
    tensors = _only_tensors(state)
    layout = payload.layout({name: tensor.stand_in() for name, tensor in tensors.items()}, METADATA)
    with path.open("wb") as file:
        file.write(layout.header)
        for name in layout.spans:
            file.write(payload.raw(tensors[name].read()))


def write_sharded(state: Mapping[str, Any], folder: Path, shard_size: int) -> None:
    """Write a state_dict of stored tensors to a folder, as a Hugging Face model of files of at most `shard_size` bytes.

    A single file is named model.safetensors. Several files have an index file, which lists the file of each tensor."""
    tensors = _only_tensors(state)
    folder.mkdir()
    shards = divide({name: tensor.nbytes for name, tensor in tensors.items()}, shard_size)
    if len(shards) == 1:
        write_file(tensors, folder / "model.safetensors")
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, keys in zip(names, shards, strict=True):
        write_file({key: tensors[key] for key in keys}, folder / name)
    files = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def divide(sizes: Mapping[str, int], shard_size: int) -> list[list[str]]:
    """Divide tensors of `sizes` bytes, in their order, into files of at most `shard_size` bytes.

    A larger tensor has a file of its own."""
    shards: list[list[str]] = [[]]
    room = shard_size
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = shard_size
        shards[-1].append(name)
        room -= size
    return shards


def parse_size(text: str) -> int:
    """Return the number of bytes in `text`, such as 500MB or 5GB; raise BadInput if it is not a size."""
    number, unit = text[:-2], {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}.get(text[-2:].upper())
    if unit is None or not (number.isascii() and number.isdecimal() and int(number)):
        raise BadInput(f"{text!r} is not a size: write it as 500MB or 5GB.")
    return int(number) * unit


def _only_tensors(state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    if others := [str(key) for key, value in state.items() if not isinstance(value, StoredTensor)]:
        raise BadInput(
            f"a safetensors file can hold only tensors, and {_first(others)} {'is not one' if len(others) == 1 else 'are not'}: "
            "export one model on its own (--only NAME), or write a .pt file or a folder/."
        )
    return dict(state)


def _first(names: Iterable[str]) -> str:
    return ", ".join([*names][:4])
