"""Read the tensors of a torch.distributed.checkpoint (DCP) folder that is not trusted, without running code in it.

The index `.metadata` is a pickle. Torch unpickles it without limits; here it may name only the few classes that an
index consists of. Tensors are read by torch's restricted reader; everything else in the folder is ignored.
"""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast import memory
from holdfast.errors import BadInput, Corrupt

_INDEX = ".metadata"
_LONGEST = 256 << 20  # bytes of an index
_OF_METADATA = {
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
    *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
}
_ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its module in Python 3.13
}


def read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a `torch.distributed.checkpoint` folder, unsharded; raise Corrupt if it is damaged."""
    try:
        index = _index(folder)
        entries = index.state_dict_metadata.items()
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        _check(folder, index, tensors)
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there is only one process
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load(state, storage_reader=_Reader(folder, index), planner=planner, no_dist=True)
        return state
    except BadInput:  # too little memory; the folder may be good
        raise
    except (Exception, CheckpointException) as error:  # an untrusted index may make torch raise anything
        text = " ".join(str(error).split())
        raise Corrupt(
            f"{folder} is not a complete folder of torch.distributed.checkpoint ({type(error).__name__}: {text:.120}): "
            "name another, or copy it again."
        ) from error


class _Reader(FileSystemReader):
    """PyTorch's DCP reader for a checkpoint folder whose index was already read and checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes in the index of a distributed checkpoint (DCP)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index has no {module}.{name}, and unpickling it could run code")


def _index(folder: Path) -> Metadata:
    path = folder / _INDEX
    if path.stat().st_size > _LONGEST:
        raise ValueError("its index is too long")
    with path.open("rb") as file:
        index = _Unpickler(file).load()
    if not isinstance(index, Metadata):
        raise TypeError("its index is something else")
    return index


def _check(folder: Path, index: Metadata, tensors: dict[str, TensorStorageMetadata]) -> None:
    for part in (index.storage_data or {}).values():
        if Path(part.relative_path).name != part.relative_path or (folder / part.relative_path).is_symlink():
            raise ValueError(f"a part of it lies elsewhere, in {part.relative_path}")
        if part.offset + part.length > (folder / part.relative_path).stat().st_size:
            raise ValueError(f"{part.relative_path} was cut off")
    for key, entry in tensors.items():
        covered = sum(_count(chunk.sizes) for chunk in entry.chunks)
        if covered != _count(entry.size):
            raise ValueError(f"{key} has {covered} of {_count(entry.size)} values")
    total = sum(_count(entry.size) * entry.properties.dtype.itemsize for entry in tensors.values())
    if total > sum(file.stat().st_size for file in folder.iterdir() if file.is_file()):
        raise ValueError(f"{total} bytes of tensors are more than its files have")
    memory.require(str(folder), total)


def _count(shape: Any) -> int:
    return int(torch.Size(shape).numel())
