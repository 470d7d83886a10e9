"""Read the tensors of a torch.distributed.checkpoint (DCP) folder that is not trusted, without running code in it.

The index `.metadata` is a pickle. Torch unpickles it without limits; this module accepts only the few classes that an
index consists of. A tensor consists of chunks. Each chunk is a `torch.save` file within a file of the folder, and only
the requested rows of a chunk are read. Everything else in the folder is ignored.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast import memory
from holdfast.checkpoint.sharding import Box, is_empty, overlap, sizes, within
from holdfast.checkpoint.stored_tensor import StoredTensor
from holdfast.errors import BadInput, Corrupt
from holdfast.weights.read_foreign import restricted_load

INDEX = ".metadata"
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


def read_dcp(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a `torch.distributed.checkpoint` folder, unsharded; raise Corrupt if it is damaged."""
    with _refusing(folder):
        index = _index(folder)
        entries = index.state_dict_metadata.items()
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        _check(folder, index, tensors)
        return {
            key: StoredTensor(entry.properties.dtype, tuple(entry.size), partial(_read, folder, index, key), position)
            for position, (key, entry) in enumerate(tensors.items())
        }


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except BadInput:  # too little memory; the folder may be good
        raise
    except Exception as error:  # an untrusted index may make torch raise anything
        text = " ".join(str(error).split())
        raise Corrupt(
            f"{folder} is not a complete folder of torch.distributed.checkpoint ({type(error).__name__}: {text:.120}): "
            "name another, or copy it again."
        ) from error


def _read(folder: Path, index: Metadata, key: str, box: Box) -> torch.Tensor:
    """Return the values of the tensor `key` inside `box`, read from the chunks that overlap the box."""
    entry = cast(TensorStorageMetadata, index.state_dict_metadata[key])
    memory.require(str(folder), _count(sizes(box)) * entry.properties.dtype.itemsize)
    with _refusing(folder):
        result = torch.empty(sizes(box), dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            pairs = zip(chunk.offsets, chunk.sizes, strict=True)
            part: Box = tuple((start, start + size) for start, size in pairs)
            common = overlap(box, part)
            if not is_empty(common):
                info = (index.storage_data or {})[MetadataIndex(key, chunk.offsets)]
                result[within(common, box)] = _Chunk(folder, info, part).read(common, result.dtype)
        return result


class _Chunk:
    """A chunk of a tensor in a file of the folder. It has the values inside the box `part`."""

    def __init__(self, folder: Path, info: Any, part: Box) -> None:
        self._path, self._info, self._part = folder / info.relative_path, info, part

    def read(self, wanted: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return the values inside the box `wanted`. If the chunk is contiguous in the file, read only their rows."""
        with self._path.open("rb", buffering=0) as file:
            chunk = cast(IO[bytes], _Slice(file, self._info.offset, self._info.length))
            described = restricted_load(chunk, device="meta")
            if tuple(described.shape) != sizes(self._part) or described.dtype != dtype:
                raise ValueError(
                    f"{self._path.name} has a chunk of shape {list(described.shape)} and {described.dtype}"
                )
            start = getattr(described.untyped_storage(), "_checkpoint_offset", None)
            if start is None or not described.is_contiguous() or described.storage_offset() or not described.ndim:
                chunk.seek(0)
                return cast(torch.Tensor, restricted_load(chunk))[within(wanted, self._part)]
            return self._read_rows(file, start, wanted, dtype)

    def _read_rows(self, file: IO[bytes], start: int, wanted: Box, dtype: torch.dtype) -> torch.Tensor:
        first, last = (row - self._part[0][0] for row in wanted[0])
        row = _count(sizes(self._part)[1:]) * dtype.itemsize
        if start + last * row > self._info.length:
            raise ValueError(f"{self._path.name} was cut off")
        data = np.empty((last - first) * row, np.uint8)
        file.seek(self._info.offset + start + first * row)
        filled = 0
        while filled < len(data) and (count := cast(Any, file).readinto(data.data[filled:])):
            filled += count
        if filled < len(data):
            raise ValueError(f"{self._path.name} was cut off")
        rows = torch.from_numpy(data).view(dtype).reshape(last - first, *sizes(self._part)[1:])
        return rows[(slice(None), *within(wanted[1:], self._part[1:]))]


class _Slice(io.RawIOBase):
    """A part of a file, which can be read like a whole file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, room: Any) -> int:
        size = max(0, min(len(room), self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        room[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes in the index of a distributed checkpoint (DCP)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index has no {module}.{name}, and unpickling it could run code")


def _index(folder: Path) -> Metadata:
    path = folder / INDEX
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
        if getattr(part, "transform_descriptors", None):
            raise ValueError(f"{part.relative_path} is compressed")
    for key, entry in tensors.items():
        covered = sum(_count(chunk.sizes) for chunk in entry.chunks)
        if covered != _count(entry.size):
            raise ValueError(f"{key} has {covered} of {_count(entry.size)} values")
    total = sum(_count(entry.size) * entry.properties.dtype.itemsize for entry in tensors.values())
    if total > sum(file.stat().st_size for file in folder.iterdir() if file.is_file()):
        raise ValueError(f"{total} bytes of tensors are more than its files have")


def _count(shape: Any) -> int:
    return int(torch.Size(shape).numel())
