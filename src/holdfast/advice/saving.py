"""How often to save: the expected run time as a function of the steps between saves, and where it is least.

Failures are a Poisson process of mean M. A save begins every τ seconds of training, makes it δ seconds later, and can be
gone back to ℓ seconds after it has begun. Between two commits lie τ + δ seconds. A failure goes back to the newest
committed save; from there to the next commit it takes R to restart, and then τ + δ + ℓ. So the expected time from commit
to commit is M (1 - e^(-(τ+δ)/M)) e^((R+τ+δ+ℓ)/M), which is Daly's formula where ℓ is 0.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.cost.formulas import daly_interval, young_interval
from holdfast.errors import BadInput

MOST = 10**9  # steps between two saves
FINE = 2000  # intervals that are looked at before the least is looked for among its neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Seconds that a step, a save, its way to the disk and a recovery take, and the mean between two failures.

    `back` is the part of the work since the last save that a failure loses: all of it where everything returns to the
    save, less where only lost blocks do.
    """

    step: float
    stall: float
    mtbf: float
    restart: float = 0.0
    durable: float = 0.0
    back: float = 1.0

    def __post_init__(self) -> None:
        for name in ("step", "mtbf"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"the {name} of {getattr(self, name):g} s is none: give a positive, finite number")
        for name in ("stall", "restart", "durable", "back"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"the {name} is {getattr(self, name):g}: give a finite number of 0 or more")


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """Steps between two saves: the best, by which formula, and between which the run takes at most 1 % longer."""

    best: int
    young: int
    daly: int
    low: int
    high: int
    effective: float  # the expected share of the wall clock that trains


def slowdown(every: npt.ArrayLike, saving: SaveCosts) -> Floats:
    """Expected seconds of wall clock for a second of training that counts, by the steps between saves; 1 at best."""
    work = np.asarray(every, dtype=np.float64) * saving.step
    if not np.all(work > 0):
        raise BadInput("no step between two saves: give 1 or more")
    cycle, mean = work + saving.stall, saving.mtbf
    if saving.back < 1:
        lost = saving.restart + saving.back * (cycle / 2 + saving.durable)
        return np.asarray(cycle / work * (1 + lost / mean))
    with np.errstate(over="ignore"):  # so long that no save is ever reached: infinite is the answer
        again = np.exp((saving.restart + cycle + saving.durable) / mean)
        return np.asarray(-mean * np.expm1(-cycle / mean) * again / work)


def best_interval(saving: SaveCosts) -> SaveInterval:
    """The steps between saves that make a run the shortest, beside Young's and Daly's."""
    first = _fewest(saving)
    last = max(first + 1, min(MOST, math.ceil(20 * saving.mtbf / saving.step)))
    grid = np.unique(np.round(np.geomspace(first, last, FINE)).astype(np.int64))
    place = int(np.argmin(slowdown(grid, saving)))
    low, high = int(grid[max(0, place - 1)]), int(grid[min(len(grid) - 1, place + 1)])
    near = np.arange(low, high + 1, max(1, (high - low) // FINE))
    best = int(near[np.argmin(slowdown(near, saving))])
    least = float(slowdown(best, saving))
    good = grid[slowdown(grid, saving) <= 1.01 * least]
    young, daly = (_steps(saving, formula) for formula in ("young", "daly"))
    return SaveInterval(best, young, daly, min([best, *good[:1].tolist()]), max([best, *good[-1:].tolist()]), 1 / least)


def _fewest(saving: SaveCosts) -> int:
    """Steps after which a save is on the disk before the next one begins."""
    return max(1, math.ceil((saving.durable - saving.stall) / saving.step))


def _steps(saving: SaveCosts, formula: str) -> int:
    if saving.stall == 0:
        return 1
    found = {"young": young_interval, "daly": daly_interval}[formula](saving.stall, saving.mtbf)
    return max(1, round(found / saving.step))
