"""A digest of a multiset of sample ids that adds up across ranks and steps.

Each id is mixed into two 64-bit numbers, and each of the two is summed with wrap-around. The order of ids does not
matter, so the digests of all ranks' samples add up to the digest of the step, however its samples were divided. A lost,
repeated or exchanged sample goes unnoticed with a probability of about 2^-128. The digest does not protect against an
adversary who chooses the ids.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.errors import BadInput, Corrupt

_WRAP = 1 << 64
_DIGEST = re.compile("[0-9a-f]{32}")
# The finalisers of splitmix64 (Steele et al., 2014) and MurmurHash3, each after an offset, because both map zero to
# zero. These numbers are a format: with others, all older histories would fail their audit.
_SPLITMIX = (0x9E3779B97F4A7C15, (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), 31)
_MURMUR = (0xD1B54A32D192ED03, (33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), 33)
_Mix = tuple[int, tuple[int, int], tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Samples:
    """A multiset of sample ids, represented by its size and a digest of 32 hex digits."""

    count: int = 0
    digest: str = "0" * 32

    @classmethod
    def of(cls, ids: ArrayLike) -> "Samples":
        """Return the `Samples` with these ids; an id that occurs twice counts twice."""
        return cls.of_each(_as_words(ids).reshape(1, -1))[0]

    @classmethod
    def of_each(cls, rows: ArrayLike) -> "list[Samples]":
        """Return one `Samples` for each row of the two-dimensional array `rows` of sample ids."""
        width = np.asarray(rows).shape[1]
        return [cls(width, _hex(high, low)) for high, low in cls.sums(rows).tolist()]

    @staticmethod
    def sums(rows: ArrayLike) -> NDArray[np.uint64]:
        """Return the digest of each row of sample ids, as two 64-bit numbers per row."""
        numbers = _as_words(rows)
        return np.stack([_mixed_sums(numbers, mix) for mix in (_SPLITMIX, _MURMUR)], axis=1)

    @classmethod
    def total(cls, parts: "Iterable[Samples]") -> "Samples":
        """Return the multiset union of `parts`: their counts and digests are added up."""
        count = high = low = 0
        for samples in parts:
            count += samples.count
            high += int(samples.digest[:16], 16)
            low += int(samples.digest[16:], 16)
        return cls(count, _hex(high, low))

    def __add__(self, other: "Samples") -> "Samples":
        return Samples.total((self, other))

    def __sub__(self, other: "Samples") -> "Samples":
        """Return these samples without the samples of `other`."""
        if other.count > self.count:
            raise BadInput(f"Cannot take {other.count} samples out of {self.count}.")
        high = int(self.digest[:16], 16) - int(other.digest[:16], 16)
        low = int(self.digest[16:], 16) - int(other.digest[16:], 16)
        return Samples(self.count - other.count, _hex(high, low))

    @property
    def only_id(self) -> int | None:
        """The sample id if there is exactly one sample, otherwise None. It is computed from the digest."""
        candidate = _unmixed(int(self.digest[:16], 16), _SPLITMIX)
        return candidate if self == Samples.of([candidate]) else None

    def to_json(self) -> dict[str, int | str]:
        return {"count": self.count, "digest": self.digest}

    @classmethod
    def from_json(cls, value: object) -> "Samples":
        """Return the samples that `to_json` wrote; raise Corrupt for anything else."""
        count, digest = (value.get("count"), value.get("digest")) if isinstance(value, Mapping) else (None, None)
        if type(count) is not int or count < 0 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise Corrupt(f"Not a count and digest of samples: {value!r:.80}.")
        return cls(count, digest)


def _as_words(ids: ArrayLike) -> NDArray[np.uint64]:
    array = np.asarray(ids)
    if array.size and array.dtype.kind not in "iu":
        raise BadInput(f"Sample ids must be integers of at most 64 bits (got {array.dtype}).")
    return array.astype(np.int64).view(np.uint64)


def _mixed_sums(numbers: NDArray[np.uint64], mix: _Mix) -> NDArray[np.uint64]:
    offset, first, second, shift = mix
    x = numbers + np.uint64(offset)  # array arithmetic wraps, as it should
    for bits, factor in (first, second):
        x ^= x >> np.uint64(bits)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(shift)
    sums: NDArray[np.uint64] = np.add.reduce(x, axis=1, dtype=np.uint64)
    return sums


def _unmixed(word: int, mix: _Mix) -> int:
    """Return the signed 64-bit sample id that the hash function with the constants `mix` maps to `word`."""
    offset, first, second, shift = mix
    x = word ^ word >> shift ^ word >> 2 * shift
    for bits, factor in (second, first):
        x = x * pow(factor, -1, _WRAP) % _WRAP
        x ^= x >> bits ^ x >> 2 * bits
    x = (x - offset) % _WRAP
    return x - _WRAP if x >= _WRAP // 2 else x


def _hex(high: int, low: int) -> str:
    return f"{high % _WRAP:016x}{low % _WRAP:016x}"
