"""Choose the blocks to save: the controller asks the nodes about their blocks until it knows which of them to save.

Every block has a place in the ranking: the policy's key as an integer, then the time of its last save, then its number.
`exchange` asks for histograms and narrows the bin that contains the last block within the budget, so that traffic grows
with nodes and bins instead of blocks; if every node has few blocks, one question is enough. The choice is exactly that
of `Policy.choose`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats, Ids
from holdfast.blocks.own_policy import is_file, urgency
from holdfast.blocks.policy import BlockInfo, Policy, distance_per_value, mean, relative_distance, total_distance
from holdfast.errors import BadInput

Codes: TypeAlias = npt.NDArray[np.uint64]
Place: TypeAlias = tuple[int, int, int]
Where: TypeAlias = Ids | slice
Ask: TypeAlias = Callable[..., Sequence[Any]]

BEFORE_ALL: Place = (0, 0, -1)
AFTER_ALL: Place = (2**64 - 1, 2**63 - 1, 2**63 - 1)
BINS = 1024  # also the number of blocks that are listed one by one
FEW = 4  # nodes with up to FEW * bins blocks list them at once, so small models need one question
_ALL = slice(None)
_SIGN = np.uint64(1 << 63)


class RankingRange(NamedTuple):
    """A range of ranking keys, which are tuples of numbers.

    The keys in the range begin with the numbers `prefix`, followed by a number from `low` to `high`."""

    prefix: tuple[int, ...]
    low: int
    high: int

    @property
    def level(self) -> int:
        return len(self.prefix)

    def shift(self, bins: int) -> int:
        """Return the logarithm to base 2 of the width of a bin, if this range is divided into at most `bins` bins."""
        return max((self.high - self.low).bit_length() - (bins.bit_length() - 1), 0)

    def bin(self, number: int, bins: int) -> "RankingRange":
        """Divide this range into `bins` equal bins, and return bin `number` as a range."""
        low = self.low + (number << self.shift(bins))
        return RankingRange(self.prefix, low, min(low + (1 << self.shift(bins)) - 1, self.high))


class Survey(NamedTuple):
    """A summary of the blocks that a node may save. It lists the blocks themselves only if they are few."""

    values: int
    candidates: int
    candidate_values: int
    lowest: Codes
    highest: Codes
    blocks: "CandidateBlocks | None"


class CandidateBlocks(NamedTuple):
    """Blocks of a node that may be saved, with their sizes and the three keys of their ranking."""

    first: Codes
    saved_at: Ids
    ids: Ids
    sizes: Ids


class SaveUpTo(NamedTuple):
    """The controller's decision: save the blocks ranked up to position `last` that changed by more than `above`."""

    above: float
    last: Place


class Candidates:
    """The blocks `ids` of one node, ranked by `policy` for the save after `step`; the model has `all_blocks` blocks."""

    def __init__(self, policy: Policy, step: int, ids: Ids, info: BlockInfo, all_blocks: int) -> None:
        self._ids, self._info = ids, info
        self._first = _ranking_keys(policy, step, ids, info, all_blocks)

    def answer(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def total(self) -> tuple[int, Fraction | None]:
        """Return the number of blocks, and their total change since their last saves (None if not finite)."""
        return len(self._ids), total_distance(self._info)

    def survey(self, above: float, few: int) -> Survey:
        """Summarize the blocks that have changed by more than `above`.

        If there are at most `few`, the summary lists them."""
        where = self._above(above)
        numbers = [self._numbers(level, where) for level in range(3)]
        found, sizes = len(numbers[0]), self._info.sizes
        lowest, highest = (np.array([end(n) for n in numbers if found], np.uint64) for end in (np.min, np.max))
        blocks = self._listed(where) if found <= few else None
        return Survey(int(sizes.sum()), found, int(sizes[where].sum()), lowest, highest, blocks)

    def histogram(self, above: float, span: RankingRange, bins: int) -> tuple[Ids, Ids]:
        """Return the number and size of blocks that changed by more than `above`, in each of `bins` bins of `span`."""
        where = self._inside(above, span)
        shifted = (self._numbers(span.level, where) - np.uint64(span.low)) >> np.uint64(span.shift(bins))
        which = shifted.view(np.int64)
        values = np.bincount(which, weights=self._info.sizes[where], minlength=bins)  # exact up to 2**53
        return np.bincount(which, minlength=bins), values.astype(np.int64)

    def blocks(self, above: float, span: RankingRange) -> CandidateBlocks:
        """List the blocks in the ranking range `span` that have changed by more than `above`."""
        return self._listed(self._inside(above, span))

    def taken(self, verdict: SaveUpTo) -> Ids:
        """Return the ids of this node's blocks that the controller's decision `verdict` selects for a save, sorted."""
        first, saved_at, number = verdict.last
        chosen = self._first < np.uint64(first)
        equal = np.flatnonzero(self._first == np.uint64(first))
        ages = self._info.saved_at[equal]
        chosen[equal] = (ages < saved_at) | ((ages == saved_at) & (self._ids[equal] <= number))
        if verdict.above > -np.inf:
            chosen &= self._info.distances > verdict.above
        return np.asarray(self._ids[chosen])

    def _listed(self, where: Where) -> CandidateBlocks:
        info = self._info
        return CandidateBlocks(self._first[where], info.saved_at[where], self._ids[where], info.sizes[where])

    def _inside(self, above: float, span: RankingRange) -> Where:
        where = self._above(above)
        for level, number in enumerate(span.prefix):
            where = _narrowed(where, self._numbers(level, where) == np.uint64(number))
        numbers = self._numbers(span.level, where)
        return _narrowed(where, (numbers >= np.uint64(span.low)) & (numbers <= np.uint64(span.high)))

    def _above(self, above: float) -> Where:
        return _ALL if above == -np.inf else np.flatnonzero(self._info.distances > above)

    def _numbers(self, level: int, where: Where) -> Codes:
        return self._first[where] if level == 0 else (self._info.saved_at, self._ids)[level - 1][where].view(np.uint64)


def _ranking_keys(policy: Policy, step: int, ids: Ids, info: BlockInfo, all_blocks: int) -> Codes:
    """Return an integer for each block in `ids` (of `all_blocks` in the model); `policy` saves the smallest first."""
    if is_file(policy.ranking):
        return _codes(-urgency(policy.ranking, info, step))
    match policy.ranking:
        case "priority":
            return _codes(-distance_per_value(info))
        case "relative":
            return _codes(-relative_distance(info))
        case "random":
            order = np.random.default_rng((policy.seed, step)).permutation(all_blocks)
            ranks = np.empty(all_blocks, np.uint64)
            ranks[order] = np.arange(all_blocks, dtype=np.uint64)
            return ranks[ids]
        case "full":
            return ids.astype(np.uint64)
        case "round" | "threshold":
            return np.zeros(len(ids), np.uint64)
    raise BadInput(f"nodes cannot choose together by policy {policy.ranking!r}")


def _codes(keys: Floats) -> Codes:
    """Map floats to unsigned integers that sort in the same order; -0 equals 0, and NaN comes last."""
    keys = keys + 0.0
    keys[np.isnan(keys)] = np.nan
    bits = keys.view(np.uint64)
    return np.asarray(bits ^ ((keys.view(np.int64) >> 63).view(np.uint64) | _SIGN))


def _narrowed(where: Where, wanted: npt.NDArray[np.bool_]) -> Where:
    if wanted.all():
        return where
    return np.flatnonzero(wanted) if isinstance(where, slice) else where[wanted]


class Selection(NamedTuple):
    """The decision which blocks to save (`verdict`), and the budget that is left for later, in array elements."""

    verdict: SaveUpTo
    credit: Fraction


Cut: TypeAlias = tuple[Place, int]  # the place of the last block to save, and the size of all blocks up to it


def exchange(policy: Policy, credit: Fraction, ask: Ask, bins: int = BINS) -> Selection:
    """Decide which blocks to save; `ask` calls a method of `Candidates` on all nodes and returns their answers.

    `credit` is the budget that earlier saves left, in array elements. Nodes send histograms of at most `bins` bins."""
    above = -np.inf
    if policy.ranking == "threshold":
        totals = ask("total")
        above = mean([moved for _, moved in totals], sum(count for count, _ in totals))
    surveys: Sequence[Survey] = ask("survey", above, FEW * bins if policy.fraction < 1 else 0)
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
        counts, values = np.sum(ask("histogram", above, span, bins), axis=0)
        up_to = np.cumsum(values)
        number = int(np.searchsorted(up_to, ceil(budget) - taken))
        taken += int(up_to[number - 1]) if number else 0
        span, count = span.bin(number, bins), int(counts[number])
    place, size = _cut(_together(ask("blocks", above, span)), ceil(budget) - taken)
    return _selection(policy, above, budget, (place, taken + size))


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
