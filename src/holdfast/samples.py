"""Which samples, without listing them: a digest of a multiset of sample ids that adds up across ranks and steps.

Each id is mixed into two 64-bit numbers, and each of the two is summed with wrap-around. A sum knows no order, so
the shares of a window add up to the window however it was divided. A sample lost, repeated or exchanged by a fault
goes unnoticed with a chance of about 2^-128; an adversary who may choose ids is not what this guards against.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.errors import BadInput, Corrupt

_WRAP = 1 << 64
# The finalisers of splitmix64 (Steele et al., 2014) and MurmurHash3, each after an offset of its own, for
# both map zero to zero. These numbers are the format: another choice makes all older histories fail their audit.
_SPLITMIX = (0x9E3779B97F4A7C15, (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), 31)
_MURMUR = (0xD1B54A32D192ED03, (33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53), 33)
_Mix = tuple[int, tuple[int, int], tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Samples:
    """A multiset of sample ids: how many, and 32 hex digits that tell which."""

    count: int = 0
    digest: str = "0" * 32

    @classmethod
    def of(cls, ids: ArrayLike) -> "Samples":
        """The samples with these ids; the same id twice counts twice."""
        numbers = _as_words(ids)
        return cls(numbers.size, _hex(_mixed_sum(numbers, _SPLITMIX), _mixed_sum(numbers, _MURMUR)))

    def __add__(self, other: "Samples") -> "Samples":
        (a, b), (c, d) = self._sums(), other._sums()
        return Samples(self.count + other.count, _hex(a + c, b + d))

    def __sub__(self, other: "Samples") -> "Samples":
        """What is left without `other`: a window without the samples a recovery declared dropped."""
        if other.count > self.count:
            raise BadInput(f"cannot take {other.count} samples out of {self.count}.")
        (a, b), (c, d) = self._sums(), other._sums()
        return Samples(self.count - other.count, _hex(a - c, b - d))

    def to_json(self) -> dict[str, int | str]:
        return {"count": self.count, "digest": self.digest}

    @classmethod
    def from_json(cls, value: object) -> "Samples":
        """The samples that `to_json` wrote; anything else is Corrupt."""
        count, digest = (value.get("count"), value.get("digest")) if isinstance(value, Mapping) else (None, None)
        if type(count) is not int or count < 0 or not isinstance(digest, str) or not _is_digest(digest):
            raise Corrupt(f"not a count and digest of samples: {value!r:.80}.")
        return cls(count, digest)

    def _sums(self) -> tuple[int, int]:
        return int(self.digest[:16], 16), int(self.digest[16:], 16)


def _as_words(ids: ArrayLike) -> NDArray[np.uint64]:
    array = np.asarray(ids)
    if array.size and array.dtype.kind not in "iu":
        raise BadInput(f"sample ids must be whole numbers of at most 64 bits, not {array.dtype}.")
    return array.ravel().astype(np.int64).view(np.uint64)


def _mixed_sum(numbers: NDArray[np.uint64], mix: _Mix) -> int:
    offset, first, second, shift = mix
    x = numbers + np.uint64(offset)  # array arithmetic wraps, which is what is wanted
    for bits, factor in (first, second):
        x ^= x >> np.uint64(bits)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(shift)
    return int(np.add.reduce(x, dtype=np.uint64))


def _hex(high: int, low: int) -> str:
    return f"{high % _WRAP:016x}{low % _WRAP:016x}"


def _is_digest(text: str) -> bool:
    return len(text) == 32 and all(character in "0123456789abcdef" for character in text)
