"""Choose which blocks to save, and when: a policy ranks the blocks and saves as many as its budget allows.

Saving the fraction r of the state every r·C steps writes as much per step as saving all of it every C steps, so
policies are compared at equal cost. Distances that blocks have moved since their last save are summed without rounding,
so that partial sums of several nodes add up to the same total.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks.division import Floats, Ids
from holdfast.blocks.own_policy import is_file, urgency
from holdfast.errors import BadInput

_LOW = 26  # a mantissa of 53 bits is summed in two halves, so that sums of 2**26 of them are still exact in a float64
_CHUNK = 2**26
_SMALLEST = -1073  # the exponent of the smallest number above zero, as `frexp` counts
_EXPONENTS = 1024 - _SMALLEST + 1


def exact_sum(values: Floats) -> Fraction:
    """Return the sum of finite numbers as a fraction, without rounding."""
    return sum((_chunk_sum(values[i : i + _CHUNK]) for i in range(0, len(values), _CHUNK)), Fraction(0))


def at_most(number: Fraction) -> float:
    """Return the largest float that is not greater than `number`."""
    nearest = float(number)
    return nearest if Fraction(nearest) <= number else float(np.nextafter(nearest, -np.inf))


def _chunk_sum(values: Floats) -> Fraction:
    fractions, exponents = np.frexp(values)
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    where = exponents - _SMALLEST
    high = np.bincount(where, weights=mantissas >> _LOW, minlength=_EXPONENTS)
    low = np.bincount(where, weights=mantissas & (2**_LOW - 1), minlength=_EXPONENTS)
    used = np.flatnonzero((high != 0) | (low != 0)).tolist()
    total = sum(((int(high[i]) << _LOW) + int(low[i])) << i for i in used)
    return Fraction(total, 2 ** (53 - _SMALLEST))


@dataclass(frozen=True, slots=True, eq=False)
class BlockInfo:
    """The facts from which a policy ranks blocks. Each field is a numpy array with one value for each block.

    The type `Floats` is an array of float64, and `Ids` an array of int64.

    - `distances`: the distance between the block's present values and its last saved values.
    - `norms`: the norm of the block's present values.
    - `saved_at`: the step of the block's last save; 0 if only its initial values are saved.
    - `sizes`: the number of array elements of the block."""

    distances: Floats
    norms: Floats
    saved_at: Ids
    sizes: Ids


Ranking: TypeAlias = Callable[[BlockInfo, np.random.Generator], Ids]
"""A function that orders the blocks, most urgent first; it may leave out blocks that need no save."""


def full(info: BlockInfo, rng: np.random.Generator) -> Ids:
    """Rank all blocks by number, to save the whole state as a traditional checkpoint does."""
    return np.arange(len(info.saved_at))


def priority(info: BlockInfo, rng: np.random.Generator) -> Ids:
    """Rank blocks by the root mean square change of values since their last save, largest first (SCAR paper)."""
    return _ranked(-distance_per_value(info), info.saved_at)


def relative(info: BlockInfo, rng: np.random.Generator) -> Ids:
    """Rank blocks by the distance from their last saved values, divided by their norms, largest first."""
    return _ranked(-relative_distance(info), info.saved_at)


def threshold(info: BlockInfo, rng: np.random.Generator) -> Ids:
    """Return the blocks that changed more than the average since their last save, the least recently saved first."""
    order = _ranked(info.saved_at)
    return np.asarray(order[info.distances[order] > mean([total_distance(info)], len(order))])


def round_robin(info: BlockInfo, rng: np.random.Generator) -> Ids:
    """Rank blocks by the step of their last save, oldest first."""
    return _ranked(info.saved_at)


def random(info: BlockInfo, rng: np.random.Generator) -> Ids:
    """Rank blocks at random. This is a poor policy, because some blocks stay unsaved for long."""
    return rng.permutation(len(info.saved_at))


def distance_per_value(info: BlockInfo) -> Floats:
    return info.distances / np.sqrt(np.maximum(info.sizes, 1))


def relative_distance(info: BlockInfo) -> Floats:
    with np.errstate(over="ignore"):  # a block with norm 0 has moved infinitely far, and comes first
        return info.distances / np.maximum(info.norms, np.finfo(np.float64).tiny)


def total_distance(info: BlockInfo) -> Fraction | None:
    """Return the exact sum of the distances that all blocks moved since their last saves; None if it is not finite."""
    return exact_sum(info.distances) if np.isfinite(info.distances).all() else None


def mean(sums: Sequence[Fraction | None], count: int) -> float:
    """Return the mean distance of `count` blocks from partial `sums`; infinity if a sum is None or `count` is 0."""
    finite = [part for part in sums if part is not None]
    if count == 0 or len(finite) < len(sums):
        return np.inf
    return at_most(sum(finite, Fraction(0)) / count)


def _ranked(*keys: Floats | Ids) -> Ids:
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
"""The schedules of the first saves; after step C they do not differ."""


class BlockChoice(NamedTuple):
    """The result of `Policy.choose`: the numbers of the blocks to save (`ids`), and the budget that is left (`credit`).

    `credit` is counted in array elements. It is negative if the save is larger than its budget, which happens because only
    whole blocks are saved."""

    ids: Ids
    credit: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A rule for saving blocks: save the given `fraction` of the state every `fraction * interval` steps.

    `ranking` decides which blocks are saved first:

    - `priority`: the blocks that changed most since their last save, by the root mean square of the changes of a block's
      values.
    - `relative`: the blocks that changed most, compared with their norms.
    - `threshold`: of the blocks that changed more than the average, those that were not saved for the longest time.
    - `round`: the blocks that were not saved for the longest time.
    - `random`: blocks at random.
    - `full`: all blocks, with `fraction=1`.
    - the path of a Python file with a function `urgency`, a ranking of your own.

    `saves` says which saves are made in the first `interval` steps: `regular` (the same as later), `early` (early saves of
    a part of the state replace the regular ones) or `early-full` (early saves of the whole state are added)."""

    ranking: str
    interval: int
    fraction: Fraction = Fraction(1)
    seed: int = 0
    saves: str = "regular"

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS and not is_file(self.ranking):
            known = ", ".join(RANKINGS)
            raise BadInput(f"There is no policy {self.ranking!r}: choose one of {known}, or give a Python file.")
        if not 0 < self.fraction <= 1:
            raise BadInput(f"The fraction of a policy must be in (0, 1] (got {self.fraction}).")
        if self.saves not in SAVES:
            raise BadInput(f"Saves cannot start {self.saves!r}: choose one of {', '.join(SAVES)}.")
        if self.ranking == "full" and self.fraction != 1:
            raise BadInput(f"Policy 'full' saves all blocks: its fraction must be 1 (got {self.fraction}).")
        if self.period < 1:
            often = f"Saving {self.fraction} of the state every {self.period} steps is more than one save per step"
            raise BadInput(f"{often}. Raise the interval to {1 / self.fraction} or more.")

    @property
    def name(self) -> str:
        """The name of the policy in tables and logs. For a policy of your own, it is the name of its file."""
        return Path(self.ranking).name

    @property
    def period(self) -> Fraction:
        return self.fraction * self.interval

    def due(self, step: int) -> bool:
        """Return True if a save is due after `step`.

        For step 0 the result is False: the initial state is saved in any case, and does not count as a save."""
        if self.saves == "early" and step <= self.interval:
            return step in self.early
        regular = step > 0 and step // self.period > (step - 1) // self.period
        return regular or (self.saves == "early-full" and step in self.early)

    @property
    def early(self) -> tuple[int, ...]:
        """The steps of the early saves: 1, 2, 4, ... below `interval`. With `saves="early"`, also `interval` itself."""
        if self.saves == "regular":
            return ()
        doubling = tuple(1 << power for power in range((self.interval - 1).bit_length()))
        return (*doubling, self.interval) if self.saves == "early" else doubling

    def at(self, step: int) -> "Policy":
        """Return the policy that chooses the blocks of the save after `step`.

        For a regular save, it is this policy itself. For an early save, it is a policy with another `ranking` and `fraction`:
        all blocks with `saves="early-full"`, and an equal part in each early save with `saves="early"`."""
        if step not in self.early:
            return self
        if self.saves == "early":
            return replace(self, ranking="round", fraction=Fraction(1, len(self.early)), saves="regular")
        return replace(self, ranking="full", fraction=Fraction(1), saves="regular")

    def written(self, steps: int) -> Fraction:
        """Return how much the policy saves in `steps` steps, as a multiple of the size of the state.

        The save of the initial state does not count."""
        return sum((self.at(step).fraction for step in range(1, steps + 1) if self.due(step)), Fraction(0))

    def choose(self, step: int, info: BlockInfo, credit: Fraction = Fraction(0)) -> BlockChoice:
        """Choose the blocks to save after `step`.

        Each save may write a limited number of array elements, its budget. `credit` is the part of the budget that
        earlier saves did not use; it is negative if they wrote more than their budget."""
        if (now := self.at(step)) is not self:
            return now.choose(step, info, credit)
        order, sizes = self._ranked(step, info), info.sizes
        if self.fraction == 1:
            return BlockChoice(np.sort(order), Fraction(0))
        budget = credit + self.fraction * int(sizes.sum())
        before = np.cumsum(sizes[order]) - sizes[order]
        taken = np.sort(order[before < ceil(budget)])  # sizes are whole numbers, so this is `before < budget`, exactly
        return BlockChoice(taken, budget - int(sizes[taken].sum()))

    def _ranked(self, step: int, info: BlockInfo) -> Ids:
        if is_file(self.ranking):
            return _ranked(-urgency(self.ranking, info, step), info.saved_at)
        rng = np.random.default_rng((self.seed, step))  # keyed by step: a choice depends on nothing drawn before
        return RANKINGS[self.ranking](info, rng)
