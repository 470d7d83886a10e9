"""What is said when nodes find out together which blocks to save: the coordinator's questions, the nodes' answers.

Every block has a place in the ranking: first what the policy ranks by, as a whole number, then when it was saved, then
its number. Places are compared in this order, and no two blocks have the same.
"""

from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids

Codes: TypeAlias = npt.NDArray[np.uint64]
Place: TypeAlias = tuple[int, int, int]

BEFORE_ALL: Place = (0, 0, -1)
AFTER_ALL: Place = (2**64 - 1, 2**63 - 1, 2**63 - 1)


class Span(NamedTuple):
    """The places that begin with these numbers and go on with one from `low` to `high`."""

    prefix: tuple[int, ...]
    low: int
    high: int

    @property
    def level(self) -> int:
        """Which of a place's three numbers lies between `low` and `high`."""
        return len(self.prefix)

    def shift(self, bins: int) -> int:
        """How many bits to leave away so that at most so many bins are left."""
        return max((self.high - self.low).bit_length() - (bins.bit_length() - 1), 0)

    def bin(self, number: int, bins: int) -> "Span":
        """One of the bins that this span is divided into."""
        low = self.low + (number << self.shift(bins))
        return Span(self.prefix, low, min(low + (1 << self.shift(bins)) - 1, self.high))


class AskTotal(NamedTuple):
    """How far have your blocks moved, all together?"""


class Total(NamedTuple):
    """How many blocks a node holds, and the exact sum of their distances: a fraction, as bytes of its two numbers."""

    blocks: int
    numerator: npt.NDArray[np.uint8]
    denominator: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, blocks: int, moved: Fraction | None) -> "Total":
        """A sum that is not finite is sent as no bytes at all."""
        return cls(blocks, *map(_as_bytes, (moved.numerator, moved.denominator) if moved is not None else (0, 0)))

    @property
    def moved(self) -> Fraction | None:
        """The sum of the distances; None if it is not finite."""
        below = _from_bytes(self.denominator)
        return Fraction(_from_bytes(self.numerator), below) if below else None


class AskSurvey(NamedTuple):
    """How many of your blocks moved further than this, and between which places do they lie?

    And which are they, if there are no more than `few`?
    """

    above: float
    few: int


class Survey(NamedTuple):
    """The values of all blocks of a node, the number and the values of its candidates, and where these lie.

    `blocks` are the candidates one by one, if they are few.
    """

    values: int
    candidates: int
    candidate_values: int
    lowest: Codes
    highest: Codes
    blocks: "CandidateBlocks | None"


class AskHistogram(NamedTuple):
    """How many of your candidates, and of their values, are in each bin of this span?"""

    above: float
    span: Span
    bins: int


class Histogram(NamedTuple):
    """The number of candidates in each bin, and of their values."""

    counts: Ids
    values: Ids


class AskBlocks(NamedTuple):
    """Which of your candidates lie in this span?"""

    above: float
    span: Span


class CandidateBlocks(NamedTuple):
    """Candidates one by one: the three numbers of each one's place, and its values."""

    first: Codes
    saved_at: Ids
    ids: Ids
    sizes: Ids


class SaveUpTo(NamedTuple):
    """Save your candidates up to this place, itself included."""

    above: float
    last: Place


def _as_bytes(number: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(number.to_bytes((number.bit_length() + 7) // 8, "little"), np.uint8)


def _from_bytes(array: npt.NDArray[np.uint8]) -> int:
    return int.from_bytes(array.tobytes(), "little")


Question: TypeAlias = AskTotal | AskSurvey | AskHistogram | AskBlocks
Answer: TypeAlias = Total | Survey | Histogram | CandidateBlocks


def wire_bytes(message: Any) -> int:
    """How many bytes a message takes, at 8 for every number outside of its arrays."""
    if isinstance(message, np.ndarray):
        return int(message.nbytes)
    return sum(map(wire_bytes, message)) if isinstance(message, tuple) else 8
