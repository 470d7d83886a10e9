"""A node's side of choosing what to save: what its own blocks answer, and which of them the verdict takes."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats, Ids
from holdfast.blocks.policy import BlockInfo, Policy, moved_a_value, moved_in_all, moved_in_proportion
from holdfast.errors import BadInput
from holdfast.server.selection import (
    Answer,
    AskBlocks,
    AskHistogram,
    AskSurvey,
    AskTotal,
    CandidateBlocks,
    Codes,
    Histogram,
    Question,
    SaveUpTo,
    Span,
    Survey,
    Total,
)

Where: TypeAlias = Ids | slice
_ALL = slice(None)
_SIGN = np.uint64(1 << 63)


class Candidates:
    """The blocks of one node, ranked by a policy among all blocks; answers are the same however often it is asked."""

    def __init__(self, policy: Policy, step: int, ids: Ids, standing: BlockInfo, count: int) -> None:
        self._ids, self._standing = ids, standing
        self._first = _first(policy, step, ids, standing, count)
        self._within: tuple[float, Span | None, Where] = (-np.inf, None, _ALL)

    def answer(self, question: Question) -> Answer:
        """What this node has to say."""
        match question:
            case AskTotal():
                return Total.of(len(self._ids), moved_in_all(self._standing))
            case AskSurvey(above, few):
                return self._survey(self._above(above), few)
            case AskHistogram(above, span, bins):
                return self._histogram(self._inside(above, span), span, bins)
            case AskBlocks(above, span):
                return self._blocks(self._inside(above, span))

    def taken(self, verdict: SaveUpTo) -> Ids:
        """The blocks of this node that are to be saved, in rising order."""
        first, saved_at, number = verdict.last
        chosen = self._first < np.uint64(first)
        equal = np.flatnonzero(self._first == np.uint64(first))
        ages = self._standing.saved_at[equal]
        chosen[equal] = (ages < saved_at) | ((ages == saved_at) & (self._ids[equal] <= number))
        if verdict.above > -np.inf:
            chosen &= self._standing.distances > verdict.above
        return np.asarray(self._ids[chosen])

    def _survey(self, where: Where, few: int) -> Survey:
        numbers = [self._numbers(level, where) for level in range(3)]
        found = len(numbers[0])
        lowest, highest = ([end(n) for n in numbers if found] for end in (np.min, np.max))
        sizes = self._standing.sizes
        ends = np.array(lowest, np.uint64), np.array(highest, np.uint64)
        blocks = self._blocks(where) if found <= few else None
        return Survey(int(sizes.sum()), found, int(sizes[where].sum()), *ends, blocks)

    def _blocks(self, where: Where) -> CandidateBlocks:
        standing = self._standing
        return CandidateBlocks(self._first[where], standing.saved_at[where], self._ids[where], standing.sizes[where])

    def _histogram(self, where: Where, span: Span, bins: int) -> Histogram:
        shifted = (self._numbers(span.level, where) - np.uint64(span.low)) >> np.uint64(span.shift(bins))
        which, sizes = shifted.view(np.int64), self._standing.sizes[where]
        counts = np.bincount(which, minlength=bins)
        values = np.bincount(which, weights=sizes, minlength=bins)  # whole numbers are exact up to 2**53
        return Histogram(counts, values.astype(np.int64))

    def _inside(self, above: float, span: Span) -> Where:
        """The candidates in a span; those of the last span are kept, since the next one lies in it most of the time."""
        known_above, known, where = self._within
        if known_above != above or known is None or not _contains(known, span):
            where = self._above(above)
        for level, number in enumerate(span.prefix):
            where = _narrowed(where, self._numbers(level, where) == np.uint64(number))
        numbers = self._numbers(span.level, where)
        where = _narrowed(where, (numbers >= np.uint64(span.low)) & (numbers <= np.uint64(span.high)))
        self._within = (above, span, where)
        return where

    def _above(self, above: float) -> Where:
        return _ALL if above == -np.inf else np.flatnonzero(self._standing.distances > above)

    def _numbers(self, level: int, where: Where) -> Codes:
        """One of the three numbers of the places of some blocks."""
        return (
            self._first[where] if level == 0 else (self._standing.saved_at, self._ids)[level - 1][where].view(np.uint64)
        )


def _first(policy: Policy, step: int, ids: Ids, standing: BlockInfo, count: int) -> Codes:
    """What the policy ranks by, as numbers that rise where urgency falls."""
    match policy.ranking:
        case "priority":
            return _codes(-moved_a_value(standing))
        case "relative":
            return _codes(-moved_in_proportion(standing))
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
    """Whole numbers in the order of floats: -0 is 0, and what is not a number comes last."""
    keys = keys + 0.0
    keys[np.isnan(keys)] = np.nan
    bits = keys.view(np.uint64)
    return np.asarray(bits ^ ((keys.view(np.int64) >> 63).view(np.uint64) | _SIGN))


def _contains(outer: Span, inner: Span) -> bool:
    depth = outer.level
    if inner.prefix[:depth] != outer.prefix or inner.level < depth:
        return False
    if inner.level > depth:
        return outer.low <= inner.prefix[depth] <= outer.high
    return outer.low <= inner.low and inner.high <= outer.high


def _narrowed(where: Where, wanted: npt.NDArray[np.bool_]) -> Where:
    if wanted.all():
        return where
    return np.flatnonzero(wanted) if isinstance(where, slice) else where[wanted]
