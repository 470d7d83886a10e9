"""Which blocks to save now, and when. A policy ranks the blocks; a budget cuts the ranking.

Saving the fraction r of the state every r·C steps writes as much per step as saving all of it every C steps, so
policies are compared at equal cost. Saves may also start early, after steps 1, 2, 4, 8 and so on up to C: a block that is
lost before its first save has nothing to come back to but the value it started with. Pure: the caller measures distances
and writes bytes.

Sums of floating-point numbers without rounding: parts that are summed apart add up to the sum of the whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks.division import Floats, Ids
from holdfast.errors import BadInput

_LOW = 26  # a mantissa of 53 bits is summed in two halves, so that sums of 2**26 of them are still exact in a float64
_CHUNK = 2**26
_SMALLEST = -1073  # the exponent of the smallest number above zero, as `frexp` counts
_EXPONENTS = 1024 - _SMALLEST + 1


def exact_sum(values: Floats) -> Fraction:
    """The sum of finite numbers, exactly."""
    return sum((_chunk_sum(values[i : i + _CHUNK]) for i in range(0, len(values), _CHUNK)), Fraction(0))


def at_most(number: Fraction) -> float:
    """The largest float that is not above a number: a float is above the one exactly if it is above the other."""
    nearest = float(number)
    return nearest if Fraction(nearest) <= number else float(np.nextafter(nearest, -np.inf))


def _chunk_sum(values: Floats) -> Fraction:
    """Mantissas are whole numbers: those of equal exponents are added up, then shifted and added as long integers."""
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    where = exponents - _SMALLEST
    high = np.bincount(where, weights=mantissas >> _LOW, minlength=_EXPONENTS)
    low = np.bincount(where, weights=mantissas & (2**_LOW - 1), minlength=_EXPONENTS)
    total = sum(
        ((int(high[i]) << _LOW) + int(low[i])) << int(i) for i in np.flatnonzero((high != 0) | (low != 0)).tolist()
    )
    return Fraction(total, 2 ** (53 - _SMALLEST))


@dataclass(frozen=True, slots=True, eq=False)
class BlockInfo:
    """What a policy may know of every block: how far it is from its saved value, its norm, when it was saved, its values."""

    distances: Floats
    norms: Floats
    saved_at: Ids
    sizes: Ids


Ranking: TypeAlias = Callable[[BlockInfo, np.random.Generator], Ids]
"""From the standing of all blocks to an order, most urgent first; blocks not worth saving may be left out."""


def full(standing: BlockInfo, rng: np.random.Generator) -> Ids:
    """All blocks in their own order: the traditional checkpoint, and the baseline."""
    return np.arange(len(standing.saved_at))


def priority(standing: BlockInfo, rng: np.random.Generator) -> Ids:
    """What moved most a value since it was saved (SCAR); equals go to the longest unsaved, then to the lowest number.

    The budget is counted in values, so this is the choice that takes most from the squared perturbation for what it
    writes. By the movement of whole blocks the largest block, which always moves most, would use up the budget.
    """
    return _ranked(-moved_a_value(standing), standing.saved_at)


def relative(standing: BlockInfo, rng: np.random.Generator) -> Ids:
    """What moved most in proportion to its own norm: small blocks count as much as large ones."""
    return _ranked(-moved_in_proportion(standing), standing.saved_at)


def threshold(standing: BlockInfo, rng: np.random.Generator) -> Ids:
    """The longest unsaved first among blocks that moved more than the mean; what is not spent is kept for later."""
    order = _ranked(standing.saved_at)
    return np.asarray(order[standing.distances[order] > mean([moved_in_all(standing)], len(order))])


def round_robin(standing: BlockInfo, rng: np.random.Generator) -> Ids:
    """The longest unsaved first: every block has its turn, however little it moved."""
    return _ranked(standing.saved_at)


def random(standing: BlockInfo, rng: np.random.Generator) -> Ids:
    """A fresh uniform draw each time: some blocks wait long, which is what makes it a poor policy."""
    return rng.permutation(len(standing.saved_at))


def moved_a_value(standing: BlockInfo) -> Floats:
    """How far each block moved since it was saved, a value: what `priority` ranks by."""
    return standing.distances / np.sqrt(np.maximum(standing.sizes, 1))


def moved_in_proportion(standing: BlockInfo) -> Floats:
    """How far each block moved since it was saved, in proportion to its own norm: what `relative` ranks by."""
    with np.errstate(over="ignore"):  # a block that fell to nothing moved infinitely far, and comes first
        return standing.distances / np.maximum(standing.norms, np.finfo(np.float64).tiny)


def moved_in_all(standing: BlockInfo) -> Fraction | None:
    """The sum of all distances, exactly, so that nodes can add up theirs; None if one of them is not finite."""
    return exact_sum(standing.distances) if np.isfinite(standing.distances).all() else None


def mean(sums: Sequence[Fraction | None], count: int) -> float:
    """What a distance must be above to be above the mean of all, given as sums of parts; nothing is above infinity."""
    finite = [part for part in sums if part is not None]
    if count == 0 or len(finite) < len(sums):
        return np.inf
    return at_most(sum(finite, Fraction(0)) / count)


def _ranked(*keys: Floats | Ids) -> Ids:
    """Rising order by the first key, ties by the next, and at last by number."""
    return np.lexsort((np.arange(len(keys[0])), *reversed(keys)))


RANKINGS: dict[str, Ranking] = {
    "full": full,
    "priority": priority,
    "round": round_robin,
    "random": random,
    "relative": relative,
    "threshold": threshold,
}


SAVES = {
    "regular": "every r·C steps, so that the last block may be saved for the first time after step C",
    "early": "after steps 1, 2, 4, ... and C an equal part, longest unsaved first: the bytes of one interval, and no more",
    "early-full": "after steps 1, 2, 4, ... before C everything: up to log2(C) states more, once",
}
"""How saves begin; after step C all are the same."""


class Choice(NamedTuple):
    """The blocks to save now, in rising order, and the budget left over (below zero: overspent) for the next save."""

    ids: Ids
    credit: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Save the fraction r of the state every r·C steps, in the order of a ranking; `saves` says how that begins."""

    ranking: str
    interval: int
    fraction: Fraction = Fraction(1)
    seed: int = 0
    saves: str = "regular"

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS:
            raise BadInput(f"there is no policy {self.ranking!r}; choose one of {', '.join(RANKINGS)}")
        if not 0 < self.fraction <= 1:
            raise BadInput(f"a policy saves a fraction in (0, 1] of the state, not {self.fraction}")
        if self.saves not in SAVES:
            raise BadInput(f"saves cannot start {self.saves!r}; choose one of {', '.join(SAVES)}")
        if self.ranking == "full" and self.fraction != 1:
            raise BadInput(f"policy 'full' saves all blocks: its fraction is 1, not {self.fraction}")
        if self.period < 1:
            raise BadInput(
                f"saving {self.fraction} of the state every {self.period} steps is more than one save a step: "
                f"raise the interval to {1 / self.fraction} or more"
            )

    @property
    def period(self) -> Fraction:
        """Steps between two saves: r·C, not always whole."""
        return self.fraction * self.interval

    def due(self, step: int) -> bool:
        """Whether to save after this step; step 0 is the initial state, which is always saved already."""
        if self.saves == "early" and step <= self.interval:
            return step in self.early
        regular = step > 0 and step // self.period > (step - 1) // self.period
        return regular or (self.saves == "early-full" and step in self.early)

    @property
    def early(self) -> tuple[int, ...]:
        """The steps of early saves: 1, 2, 4, ... before C, and C itself where early saves share the bytes of one interval."""
        if self.saves == "regular":
            return ()
        doubling = tuple(1 << power for power in range((self.interval - 1).bit_length()))
        return (*doubling, self.interval) if self.saves == "early" else doubling

    def at(self, step: int) -> "Policy":
        """What the save after this step goes by: this policy, or for an early save one of its own."""
        if step not in self.early:
            return self
        if self.saves == "early":
            return replace(self, ranking="round", fraction=Fraction(1, len(self.early)), saves="regular")
        return replace(self, ranking="full", fraction=Fraction(1), saves="regular")

    def written(self, steps: int) -> Fraction:
        """How much was written after so many steps, in states, the initial one not counted."""
        return sum((self.at(step).fraction for step in range(1, steps + 1) if self.due(step)), Fraction(0))

    def choose(self, step: int, standing: BlockInfo, credit: Fraction = Fraction(0)) -> Choice:
        """The blocks to save after this step, within a budget of r times the state plus what the last save left over.

        Blocks differ in size, so the last one may overspend; the next save then has less. In the long run every policy
        writes the same number of values.
        """
        if (now := self.at(step)) is not self:
            return now.choose(step, standing, credit)
        rng = np.random.default_rng((self.seed, step))  # keyed by step: a choice depends on nothing drawn before
        order, sizes = RANKINGS[self.ranking](standing, rng), standing.sizes
        if self.fraction == 1:
            return Choice(np.sort(order), Fraction(0))
        budget = credit + self.fraction * int(sizes.sum())
        before = np.cumsum(sizes[order]) - sizes[order]
        taken = np.sort(order[before < ceil(budget)])  # sizes are whole numbers, so this is `before < budget`, exactly
        return Choice(taken, budget - int(sizes[taken].sum()))
