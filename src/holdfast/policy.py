"""Which blocks to save now, and when. A policy ranks the blocks; a budget cuts the ranking.

Saving the fraction r of the state every r·C steps writes as much per step as saving all of it every C steps, so
policies are compared at equal cost. Pure: the caller measures distances and writes bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np

from holdfast.blocks import Floats, Ids
from holdfast.errors import BadInput

Ranking: TypeAlias = Callable[[Floats, Ids, np.random.Generator], Ids]
"""From each block's distance to its saved value and the step it was saved at, to an order: most urgent first."""


def full(distances: Floats, saved_at: Ids, rng: np.random.Generator) -> Ids:
    """All blocks in their own order: the traditional checkpoint, and the baseline."""
    return np.arange(len(saved_at))


def priority(distances: Floats, saved_at: Ids, rng: np.random.Generator) -> Ids:
    """What moved most since it was saved (SCAR); equals go to the longest unsaved, then to the lowest number."""
    return np.lexsort((np.arange(len(saved_at)), saved_at, -distances))


def round_robin(distances: Floats, saved_at: Ids, rng: np.random.Generator) -> Ids:
    """The longest unsaved first: every block has its turn, however little it moved."""
    return np.lexsort((np.arange(len(saved_at)), saved_at))


def random(distances: Floats, saved_at: Ids, rng: np.random.Generator) -> Ids:
    """A fresh uniform draw each time: some blocks wait long, which is what makes it a poor policy."""
    return rng.permutation(len(saved_at))


RANKINGS: dict[str, Ranking] = {"full": full, "priority": priority, "round": round_robin, "random": random}


class Choice(NamedTuple):
    """The blocks to save now, in rising order, and the budget left over (below zero: overspent) for the next save."""

    ids: Ids
    credit: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Save the fraction r of the state every r·C steps, in the order of a ranking."""

    ranking: str
    interval: int
    fraction: Fraction = Fraction(1)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranking not in RANKINGS:
            raise BadInput(f"there is no policy {self.ranking!r}; choose one of {', '.join(RANKINGS)}")
        if not 0 < self.fraction <= 1:
            raise BadInput(f"a policy saves a fraction in (0, 1] of the state, not {self.fraction}")
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
        return step > 0 and step // self.period > (step - 1) // self.period

    def choose(self, step: int, distances: Floats, saved_at: Ids, sizes: Ids, credit: Fraction = Fraction(0)) -> Choice:
        """The blocks to save after this step, within a budget of r times the state plus what the last save left over.

        Blocks differ in size, so the last one may overspend; the next save then has less. In the long run every policy
        writes the same number of values.
        """
        rng = np.random.default_rng((self.seed, step))  # keyed by step: a choice depends on nothing drawn before
        order = RANKINGS[self.ranking](distances, saved_at, rng)
        if self.fraction == 1:
            return Choice(np.sort(order), Fraction(0))
        budget = credit + self.fraction * int(sizes.sum())
        before = np.cumsum(sizes[order]) - sizes[order]
        taken = np.sort(order[before < ceil(budget)])  # sizes are whole numbers, so this is `before < budget`, exactly
        return Choice(taken, budget - int(sizes[taken].sum()))
