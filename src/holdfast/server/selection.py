"""Choose the blocks to save in a conversation: the controller asks, nodes answer, until the last block is found.

Every block has a place in the ranking: the policy's key as an integer, then the time of its last save, then its number.
Places are compared in this order, and no two are equal. The cut is the place of the last block within the budget.

`exchange` asks for histograms and narrows the bin that contains the cut, so that traffic grows with nodes and bins
instead of blocks; if every node has few blocks, one question is enough. The choice is exactly that of `Policy.choose`.
A conversation is a generator of questions that receives the answers of all nodes; its caller carries the messages.
"""

from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.blocks.policy import Policy, mean

Codes: TypeAlias = npt.NDArray[np.uint64]
Place: TypeAlias = tuple[int, int, int]

BEFORE_ALL: Place = (0, 0, -1)
AFTER_ALL: Place = (2**64 - 1, 2**63 - 1, 2**63 - 1)


class RankingRange(NamedTuple):
    """A range of positions in the order in which blocks are saved; a position is a tuple of three integers.

    The range has the positions that begin with `prefix` and continue with a number from `low` to `high`, inclusive."""

    prefix: tuple[int, ...]
    low: int
    high: int

    @property
    def level(self) -> int:
        return len(self.prefix)

    def shift(self, bins: int) -> int:
        """Return by how many bits to shift numbers right, so that the range has at most `bins` different numbers."""
        return max((self.high - self.low).bit_length() - (bins.bit_length() - 1), 0)

    def bin(self, number: int, bins: int) -> "RankingRange":
        """Divide this range into `bins` equal bins, and return bin `number` as a range."""
        low = self.low + (number << self.shift(bins))
        return RankingRange(self.prefix, low, min(low + (1 << self.shift(bins)) - 1, self.high))


class AskTotal(NamedTuple):
    """A question to each server node: how far have all its blocks together moved since their last saves?"""


class BlockTotal(NamedTuple):
    """A node's answer to `AskTotal`: its number of blocks, and the sum of their distances (None if not finite)."""

    blocks: int
    moved: Fraction | None


class AskSurvey(NamedTuple):
    """A question to each node: which blocks moved by more than `above`? They are listed if there are at most `few`."""

    above: float
    few: int


class Survey(NamedTuple):
    """A node's answer to `AskSurvey`: the number, total size and ranking range of the blocks that may be saved."""

    values: int
    candidates: int
    candidate_values: int
    lowest: Codes
    highest: Codes
    blocks: "CandidateBlocks | None"


class AskHistogram(NamedTuple):
    """A question to each node: how many blocks of what size are in each of `bins` bins of the ranking range `span`?"""

    above: float
    span: RankingRange
    bins: int


class Histogram(NamedTuple):
    """A node's answer to `AskHistogram`: for each bin, the number of blocks and their total size in array elements."""

    counts: Ids
    values: Ids


class AskBlocks(NamedTuple):
    """A question to each node: which blocks moved by more than `above` and are in the ranking range `span`?"""

    above: float
    span: RankingRange


class CandidateBlocks(NamedTuple):
    """A node's answer: the blocks that may be saved, with their sizes and the three keys by which they are ranked."""

    first: Codes
    saved_at: Ids
    ids: Ids
    sizes: Ids


class SaveUpTo(NamedTuple):
    """The controller's decision: save the blocks ranked up to position `last` that moved by more than `above`."""

    above: float
    last: Place


Question: TypeAlias = AskTotal | AskSurvey | AskHistogram | AskBlocks
Answer: TypeAlias = BlockTotal | Survey | Histogram | CandidateBlocks


BINS = 1024  # also the number of blocks that are listed one by one
FEW = 4  # nodes with up to FEW * bins blocks list them at once, so small models need one question


class Selection(NamedTuple):
    """The decision which blocks to save, and the part of the budget that remains, in array elements."""

    verdict: SaveUpTo
    credit: Fraction


Conversation: TypeAlias = Generator[Question, Sequence[Answer], Selection]
Cut: TypeAlias = tuple[Place, int]
"""The position of the last block to save in the ranking, and the total size of the blocks up to it."""


def converse(conversation: Conversation, ask: Callable[[Question], Sequence[Answer]]) -> Selection:
    """Pass each question of `conversation` to `ask`, which returns all nodes' answers; return the final decision."""
    try:
        question = next(conversation)
        while True:
            question = conversation.send(ask(question))
    except StopIteration as end:
        selection: Selection = end.value
        return selection


def exchange(policy: Policy, credit: Fraction, bins: int = BINS) -> Conversation:
    """Decide which blocks to save: a generator of questions to all nodes, which receives the answers by `send`.

    `credit` is the budget that earlier saves left, in array elements. Nodes send histograms of at most `bins` bins."""
    above = yield from _above(policy)
    surveys = _all(Survey, (yield AskSurvey(above, FEW * bins if policy.fraction < 1 else 0)))
    count = sum(survey.candidates for survey in surveys)
    candidates = sum(survey.candidate_values for survey in surveys)
    budget = credit + policy.fraction * sum(survey.values for survey in surveys)
    if (known := _trivial_cut(policy, budget, candidates)) is not None:
        return _selection(policy, above, budget, known)
    listed = [survey.blocks for survey in surveys if survey.blocks is not None]
    if len(listed) == len(surveys):
        return _selection(policy, above, budget, _cut(_together(listed), ceil(budget)))
    ends, taken = _ends(surveys), 0
    span = RankingRange((), *ends[0])
    while count > bins:
        while span.low == span.high:
            span = RankingRange((*span.prefix, span.low), *ends[span.level + 1])
        histograms = _all(Histogram, (yield AskHistogram(above, span, bins)))
        counts = np.sum([histogram.counts for histogram in histograms], axis=0)
        up_to = np.cumsum(np.sum([histogram.values for histogram in histograms], axis=0))
        number = int(np.searchsorted(up_to, ceil(budget) - taken))
        taken += int(up_to[number - 1]) if number else 0
        span, count = span.bin(number, bins), int(counts[number])
    blocks = _together(_all(CandidateBlocks, (yield AskBlocks(above, span))))
    place, values = _cut(blocks, ceil(budget) - taken)
    return _selection(policy, above, budget, (place, taken + values))


def _above(policy: Policy) -> Generator[Question, Sequence[Answer], float]:
    if policy.ranking != "threshold":
        return -np.inf
    totals = _all(BlockTotal, (yield AskTotal()))
    return mean([total.moved for total in totals], sum(total.blocks for total in totals))


def _trivial_cut(policy: Policy, budget: Fraction, candidates: int) -> Cut | None:
    if policy.fraction == 1 or candidates < budget:
        return AFTER_ALL, candidates
    return (BEFORE_ALL, 0) if budget <= 0 else None


def _cut(blocks: CandidateBlocks, limit: int) -> Cut:
    order = np.lexsort((blocks.ids, blocks.saved_at, blocks.first))
    up_to = np.cumsum(blocks.sizes[order])
    at = int(np.searchsorted(up_to, limit))
    last = order[at]
    return (int(blocks.first[last]), int(blocks.saved_at[last]), int(blocks.ids[last])), int(up_to[at])


def _selection(policy: Policy, above: float, budget: Fraction, spent: Cut) -> Selection:
    place, values = spent
    return Selection(SaveUpTo(above, place), Fraction(0) if policy.fraction == 1 else budget - values)


def _ends(surveys: Sequence[Survey]) -> list[tuple[int, int]]:
    surveyed = [survey for survey in surveys if survey.candidates]
    lowest, highest = (np.array([getattr(s, end) for s in surveyed], np.uint64) for end in ("lowest", "highest"))
    return [(int(lowest[:, i].min()), int(highest[:, i].max())) for i in range(3)] if surveyed else []


def _together(parts: Sequence[CandidateBlocks]) -> CandidateBlocks:
    return CandidateBlocks(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


Kind = TypeVar("Kind")


def _all(kind: type[Kind], answers: Sequence[Answer]) -> list[Kind]:
    wrong = next((answer for answer in answers if not isinstance(answer, kind)), None)
    if wrong is not None:
        raise TypeError(f"a node answered with a {type(wrong).__name__} where a {kind.__name__} was asked for")
    return [answer for answer in answers if isinstance(answer, kind)]
