"""Digests of weights, to recognise the source of a run's weights, and to verify every part that a rank reads.

The rows of a tensor are divided into chunks of about 1 MiB, and each chunk has a digest. So a rank that reads some rows
can verify them without reading the other rows. The digests do not depend on the format of the file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash

from holdfast.checkpoint import payload
from holdfast.checkpoint.payload import CHUNK
from holdfast.checkpoint.sharding import Box, is_empty, sizes, within
from holdfast.checkpoint.stored_tensor import StoredTensor

HEX = 32  # characters of a digest
PIECE = 32  # chunks that are read at once


def tabulate(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Read all tensors. Return the digests of each tensor's chunks, joined into one text, by the tensor's name."""
    ordered = sorted(tensors.items(), key=lambda pair: pair[1].position)
    return {name: "".join(_digests(tensor)) for name, tensor in ordered}


def content_digest(tensors: Mapping[str, StoredTensor], table: Mapping[str, str], others: Any = None) -> str:
    """Return a digest of the names, dtypes, shapes and values of tensors, and of the JSON value `others`.

    `table` has the digests of the tensors' values, as `tabulate` returns them."""
    hasher = xxhash.xxh3_128(json.dumps(others).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(repr((name, tensor.dtype, tensor.shape, table.get(name))).encode())
    return str(hasher.hexdigest())


def verified(tensor: StoredTensor, digests: str, refuse: Callable[[], Exception]) -> StoredTensor:
    """Return a copy of `tensor` that compares its values with `digests` when they are read.

    If the values differ, reading raises the exception that `refuse()` returns."""

    def read(box: Box) -> torch.Tensor:
        if is_empty(box):
            return torch.empty(sizes(box), dtype=tensor.dtype)
        first, last = _chunks_of(tensor, box)
        wide = _rows(tensor, first, last)
        values = torch.as_tensor(tensor.read_part(wide))
        if list(_chunk_digests(tensor, values)) != [digests[i * HEX : (i + 1) * HEX] for i in range(first, last)]:
            raise refuse()
        return values[within(box, wide)]

    return replace(tensor, read_part=read)


def _digests(tensor: StoredTensor) -> Iterator[str]:
    if is_empty(tensor.whole):
        return
    _, count = _chunks_of(tensor, tensor.whole)
    for first in range(0, count, PIECE):
        yield from _chunk_digests(tensor, tensor.read_part(_rows(tensor, first, min(first + PIECE, count))))


def _chunk_digests(tensor: StoredTensor, values: Any) -> Iterator[str]:
    data, size = payload.raw(values), _rows_per_chunk(tensor) * _row_size(tensor)
    for start in range(0, len(data), size):
        yield str(xxhash.xxh3_128_hexdigest(data[start : start + size]))


def _chunks_of(tensor: StoredTensor, box: Box) -> tuple[int, int]:
    """Return the numbers (first, end) of the chunks that have rows of `box`. The chunk `end` is not included."""
    if not box:  # a number
        return 0, 1
    rows = _rows_per_chunk(tensor)
    return box[0][0] // rows, -(-box[0][1] // rows)


def _rows(tensor: StoredTensor, first: int, last: int) -> Box:
    """Return the box with the rows of the chunks from `first` up to, but not including, `last`."""
    if not tensor.shape:
        return ()
    rows = _rows_per_chunk(tensor)
    return ((first * rows, min(last * rows, tensor.shape[0])), *tensor.whole[1:])


def _rows_per_chunk(tensor: StoredTensor) -> int:
    return max(1, CHUNK // _row_size(tensor))


def _row_size(tensor: StoredTensor) -> int:
    return max(1, tensor.nbytes // max(1, *tensor.shape[:1]) if tensor.shape else tensor.nbytes)
