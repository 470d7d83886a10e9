"""Packs columns of numbers into few bytes without loss, and unpacks them.

A column is an array with one row for each rank and one value for each step. It is stored as the differences from step to
step if these are smaller, minus the smallest one, in as few bytes as the largest needs. The first bytes of all values
are together, then all second bytes, and so on, because deflate finds more in them then. Equal rows are stored once.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]  # signed numbers and floats are stored by their bits
Description: TypeAlias = dict[str, Any]
"""The description of a stored column, as JSON: its number of rows, and the steps that decode it."""

LARGEST = 1 << 28  # values of a column: a damaged description must not fill the memory
_MICRO = 1e6


def pack(column: NDArray[Any]) -> tuple[Description, NDArray[np.uint8] | None]:
    """Return how a column is stored, and its bytes; None instead of the bytes if its description says everything."""
    kind, words = _as_words(np.ascontiguousarray(column))
    rows = len(words)
    if rows > 1 and (words[1:] == words[0]).all():
        words = words[:1]
    described: Description = {"kind": kind, "shape": list(words.shape)}
    differences = np.diff(words, axis=1, prepend=np.uint64(0))
    differences[:, 0] = words[:, 0]
    rest, first = differences[:, 1:], words[:, 0]
    is_difference = rest.size > 0 and _width(rest) < _width(words)
    if is_difference:
        described["first"] = first.tolist()
    kept = rest if is_difference else words
    base = _smallest(kept)
    kept = kept - base
    described |= {"base": int(base), "bytes": _width_from(kept)}
    if not described["bytes"]:
        return described, None
    planes = kept.astype("<u8").view(np.uint8).reshape(-1, 8)[:, : described["bytes"]]
    return described, np.ascontiguousarray(planes.T)


def unpack(described: Mapping[str, Any], read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """Return the column that `pack` stored, with one row if all were equal. `read` returns its bytes."""
    (rows, steps), width = described["shape"], described["bytes"]
    if rows * steps > LARGEST:
        raise ValueError("a column is too large")
    first = described.get("first")
    kept_steps = steps if first is None else steps - 1
    kept = np.zeros((rows, kept_steps), np.uint64)
    if width:
        planes = read()
        if planes.dtype != np.uint8 or planes.shape != (width, rows * kept_steps):
            raise ValueError("a column has another size than its description")
        kept.view(np.uint8).reshape(-1, 8)[:, :width] = planes.T
    kept += np.uint64(described["base"])
    if first is not None:
        words = np.empty((rows, steps), np.uint64)
        words[:, 0] = np.array(first, np.uint64)
        words[:, 1:] = kept
        np.cumsum(words, axis=1, out=words)
        kept = words
    return _from_words(described["kind"], kept)


def _as_words(column: NDArray[Any]) -> tuple[str, Words]:
    if column.dtype != np.float64:
        return ("words" if column.dtype == np.uint64 else "whole"), column.view(np.uint64)
    bits = column.view(np.uint64)
    with np.errstate(invalid="ignore", over="ignore"):
        micros = np.rint(column * _MICRO)
        if (np.abs(micros) < 1 << 53).all():
            whole = micros.astype(np.int64)
            if ((whole / _MICRO).view(np.uint64) == bits).all():
                return "micro", whole.view(np.uint64)
        short = column.astype(np.float32)
        if (short.astype(np.float64).view(np.uint64) == bits).all():
            return "float32", short.view(np.uint32).astype(np.uint64)
    return "float64", bits


def _from_words(kind: str, words: Words) -> NDArray[Any]:
    if kind == "words":
        return words
    if kind == "whole":
        return words.view(np.int64)
    if kind == "micro":
        return words.view(np.int64) / _MICRO
    if kind == "float32":
        return words.astype(np.uint32).view(np.float32).astype(np.float64)
    if kind == "float64":
        return words.view(np.float64)
    raise ValueError(f"a column of the unknown kind {kind!r:.20}")


def _smallest(words: Words) -> np.uint64:
    """Return the smallest of `words` as signed numbers, so that small negative ones are near."""
    return np.uint64(words.view(np.int64).min().view(np.uint64))


def _width(words: Words) -> int:
    return _width_from(words - _smallest(words))


def _width_from(words: Words) -> int:
    """Return the number of bytes that the largest of `words` needs; 0 if all are 0."""
    return (int(words.max()).bit_length() + 7) // 8
