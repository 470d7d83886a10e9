"""The node's side of choosing the blocks to save: it answers questions about its blocks and applies the decision."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats, Ids
from holdfast.blocks.own_policy import is_file, urgency
from holdfast.blocks.policy import BlockInfo, Policy, distance_per_value, relative_distance, total_distance
from holdfast.errors import BadInput
from holdfast.server.selection import (
    Answer,
    AskBlocks,
    AskHistogram,
    AskSurvey,
    AskTotal,
    BlockTotal,
    CandidateBlocks,
    Codes,
    Histogram,
    Question,
    RankingRange,
    SaveUpTo,
    Survey,
)

Where: TypeAlias = Ids | slice
_ALL = slice(None)
_SIGN = np.uint64(1 << 63)


class Candidates:
    """The blocks `ids` of one node, ranked by `policy` for the save after `step`; the run has `count` blocks."""

    def __init__(self, policy: Policy, step: int, ids: Ids, info: BlockInfo, count: int) -> None:
        self._ids, self._info = ids, info
        self._first = _ranking_keys(policy, step, ids, info, count)

    def answer(self, question: Question) -> Answer:
        match question:
            case AskTotal():
                return BlockTotal(len(self._ids), total_distance(self._info))
            case AskSurvey(above, few):
                where = self._above(above)
                numbers = [self._numbers(level, where) for level in range(3)]
                found, sizes = len(numbers[0]), self._info.sizes
                lowest, highest = (np.array([end(n) for n in numbers if found], np.uint64) for end in (np.min, np.max))
                blocks = self._blocks(where) if found <= few else None
                return Survey(int(sizes.sum()), found, int(sizes[where].sum()), lowest, highest, blocks)
            case AskHistogram(above, span, bins):
                where = self._inside(above, span)
                shifted = (self._numbers(span.level, where) - np.uint64(span.low)) >> np.uint64(span.shift(bins))
                which = shifted.view(np.int64)
                values = np.bincount(which, weights=self._info.sizes[where], minlength=bins)  # exact up to 2**53
                return Histogram(np.bincount(which, minlength=bins), values.astype(np.int64))
            case AskBlocks(above, span):
                return self._blocks(self._inside(above, span))

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

    def _blocks(self, where: Where) -> CandidateBlocks:
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


def _ranking_keys(policy: Policy, step: int, ids: Ids, info: BlockInfo, count: int) -> Codes:
    """Return an integer for each of the blocks `ids`; `policy` saves the blocks with the smallest integers first."""
    if is_file(policy.ranking):
        return _codes(-urgency(policy.ranking, info, step))
    match policy.ranking:
        case "priority":
            return _codes(-distance_per_value(info))
        case "relative":
            return _codes(-relative_distance(info))
        case "random":
            order = np.random.default_rng((policy.seed, step)).permutation(count)
            ranks = np.empty(count, np.uint64)
            ranks[order] = np.arange(count, dtype=np.uint64)
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
