"""The coordinator's side of choosing what to save: the cut that a policy makes through the ranking of all blocks.

`central` asks for every block. `exchange` asks for histograms and narrows the bin that the cut goes through, so that
traffic grows with nodes and bins and not with blocks; where every node has few blocks, one question is enough. Both come to the choice of `Policy.choose`, to the last block and
the last bit of credit. A conversation is a generator of questions that is sent the answers of all nodes; whoever runs
it carries the messages.
"""

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.blocks.policy import Policy, mean

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


BINS = 1024  # also how many blocks are few enough to be looked at one by one
FEW = 4  # times the bins: of so many blocks a node tells at once, so that small models need one question
EVERYTHING = Span((), 0, 2**64 - 1)


class Selection(NamedTuple):
    """What nodes are told to save, and the budget left over (below zero: overspent) for the next save."""

    verdict: SaveUpTo
    credit: Fraction


Conversation: TypeAlias = Generator[Question, Sequence[Answer], Selection]
CostBreakdown: TypeAlias = tuple[Place, int]
"""The place of the last block that is taken, and how many values are taken up to there."""


def converse(conversation: Conversation, ask: Callable[[Question], Sequence[Answer]]) -> Selection:
    """Carry questions to the nodes and their answers back, until it is known what to save."""
    try:
        question = next(conversation)
        while True:
            question = conversation.send(ask(question))
    except StopIteration as end:
        selection: Selection = end.value
        return selection


def exchange(policy: Policy, credit: Fraction, bins: int = BINS) -> Conversation:
    """Find the cut by histograms: a few rounds of at most `bins` counts a node, then the few blocks around the cut.

    A round divides what is left by at least half of `bins`, which is 2 or more. There are no rounds if the first answers
    have all candidates.
    """
    above = yield from _above(policy)
    surveys = _all(Survey, (yield AskSurvey(above, FEW * bins if policy.fraction < 1 else 0)))
    count = sum(survey.candidates for survey in surveys)
    candidates = sum(survey.candidate_values for survey in surveys)
    budget = credit + policy.fraction * sum(survey.values for survey in surveys)
    if (known := _without_looking(policy, budget, candidates)) is not None:
        return _selection(policy, above, budget, known)
    told = [survey.blocks for survey in surveys if survey.blocks is not None]
    if len(told) == len(surveys):
        return _selection(policy, above, budget, _cut(_together(told), ceil(budget)))
    ends, taken = _ends(surveys), 0
    span = Span((), *ends[0])
    while count > bins:
        while span.low == span.high:
            span = Span((*span.prefix, span.low), *ends[span.level + 1])
        found = _all(Histogram, (yield AskHistogram(above, span, bins)))
        counts = np.sum([histogram.counts for histogram in found], axis=0)
        up_to = np.cumsum(np.sum([histogram.values for histogram in found], axis=0))
        number = int(np.searchsorted(up_to, ceil(budget) - taken))
        taken += int(up_to[number - 1]) if number else 0
        span, count = span.bin(number, bins), int(counts[number])
    blocks = _together(_all(CandidateBlocks, (yield AskBlocks(above, span))))
    place, values = _cut(blocks, ceil(budget) - taken)
    return _selection(policy, above, budget, (place, taken + values))


def central(policy: Policy, credit: Fraction) -> Conversation:
    """Ask every node for all of its blocks and rank them here: what `exchange` is compared with."""
    above = yield from _above(policy)
    surveys = _all(Survey, (yield AskSurvey(above, 0)))
    blocks = _together(_all(CandidateBlocks, (yield AskBlocks(above, EVERYTHING))))
    budget = credit + policy.fraction * sum(survey.values for survey in surveys)
    known = _without_looking(policy, budget, int(blocks.sizes.sum()))
    return _selection(policy, above, budget, known or _cut(blocks, ceil(budget)))


def _above(policy: Policy) -> Generator[Question, Sequence[Answer], float]:
    """What a block must have moved to be a candidate: more than the mean of all where the policy says so."""
    if policy.ranking != "threshold":
        return -np.inf
    totals = _all(Total, (yield AskTotal()))
    return mean([total.moved for total in totals], sum(total.blocks for total in totals))


def _without_looking(policy: Policy, budget: Fraction, candidates: int) -> CostBreakdown | None:
    """All or nothing, where the budget says so."""
    if policy.fraction == 1 or candidates < budget:
        return AFTER_ALL, candidates
    return (BEFORE_ALL, 0) if budget <= 0 else None


def _cut(blocks: CandidateBlocks, limit: int) -> CostBreakdown:
    """The first block, in order, with which so many values are reached; there are so many."""
    order = np.lexsort((blocks.ids, blocks.saved_at, blocks.first))
    up_to = np.cumsum(blocks.sizes[order])
    at = int(np.searchsorted(up_to, limit))
    last = order[at]
    return (int(blocks.first[last]), int(blocks.saved_at[last]), int(blocks.ids[last])), int(up_to[at])


def _selection(policy: Policy, above: float, budget: Fraction, spent: CostBreakdown) -> Selection:
    place, values = spent
    return Selection(SaveUpTo(above, place), Fraction(0) if policy.fraction == 1 else budget - values)


def _ends(surveys: Sequence[Survey]) -> list[tuple[int, int]]:
    """Between what the three numbers of all candidates' places lie."""
    found = [survey for survey in surveys if survey.candidates]
    lowest, highest = (np.array([getattr(s, end) for s in found], np.uint64) for end in ("lowest", "highest"))
    return [(int(lowest[:, i].min()), int(highest[:, i].max())) for i in range(3)] if found else []


def _together(parts: Sequence[CandidateBlocks]) -> CandidateBlocks:
    return CandidateBlocks(*(np.concatenate(each) for each in zip(*parts, strict=True)))


Kind = TypeVar("Kind")


def _all(kind: type[Kind], answers: Sequence[Answer]) -> list[Kind]:
    """The answers of all nodes, which must be of the kind that was asked for."""
    wrong = next((answer for answer in answers if not isinstance(answer, kind)), None)
    if wrong is not None:
        raise TypeError(f"a node answered with a {type(wrong).__name__} where a {kind.__name__} was asked for")
    return [answer for answer in answers if isinstance(answer, kind)]
