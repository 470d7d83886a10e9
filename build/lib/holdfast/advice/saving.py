"""The best save interval: the number of steps between saves that minimizes the expected run time.

Failures are a Poisson process with a mean time M between them. A save begins every τ seconds of training, delays
training by δ seconds, and is durable ℓ seconds after it began. After a failure, training restarts from the newest
durable save in R seconds, and needs τ + δ + ℓ seconds to the next durable save. So the expected time between two
durable saves is M (1 - e^(-(τ+δ)/M)) e^((R+τ+δ+ℓ)/M), which is Daly's formula if ℓ is 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput

MOST = 10**9  # steps between two saves
FINE = 2000  # intervals of the coarse search, and of the fine one around its minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """The durations in seconds that determine the best save interval: step, save, restart, time between failures."""

    step: float
    stall: float  # delay of training by a save
    mtbf: float
    restart: float = 0.0
    durable: float = 0.0  # from the start of a save until it is durable
    back: float = 1.0  # fraction of the work since the last save that a failure loses; less if only lost blocks return

    def __post_init__(self) -> None:
        for name in ("step", "mtbf"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"{name} must be positive and finite (got {getattr(self, name):g}).")
        for name in ("stall", "restart", "durable", "back"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"{name} must be finite and 0 or more (got {getattr(self, name):g}).")


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """The best number of steps between saves, and for comparison the results of Young's and Daly's formulas."""

    best: int
    young: int
    daly: int
    low: int  # from `low` to `high`, the run takes at most 1 % longer
    high: int
    effective: float  # the expected share of the wall clock that trains


def slowdown(every: npt.ArrayLike, saving: SaveCosts) -> Floats:
    """Return the expected wall-clock seconds per second of useful training, if the job saves every `every` steps."""
    work = np.asarray(every, dtype=np.float64) * saving.step
    if not np.all(work > 0):
        raise BadInput("the steps between two saves must be 1 or more.")
    cycle, mean = work + saving.stall, saving.mtbf
    if saving.back < 1:
        lost = saving.restart + saving.back * (cycle / 2 + saving.durable)
        return np.asarray(cycle / work * (1 + lost / mean))
    with np.errstate(over="ignore"):  # infinite if no save is ever reached
        again = np.exp((saving.restart + cycle + saving.durable) / mean)
        return np.asarray(-mean * np.expm1(-cycle / mean) * again / work)


def best_interval(saving: SaveCosts, length: int | None = None) -> SaveInterval:
    """Return the number of steps between saves that minimizes the expected run time; at most `length`, if given."""
    first = max(1, math.ceil((saving.durable - saving.stall) / saving.step))  # a save is durable before the next begins
    last = max(first + 1, min(length or MOST, MOST, math.ceil(20 * saving.mtbf / saving.step)))
    grid = np.unique(np.round(np.geomspace(first, last, FINE)).astype(np.int64))
    place = int(np.argmin(slowdown(grid, saving)))
    low, high = int(grid[max(0, place - 1)]), int(grid[min(len(grid) - 1, place + 1)])
    near = np.arange(low, high + 1, max(1, (high - low) // FINE))
    best = int(near[np.argmin(slowdown(near, saving))])
    least = float(slowdown(best, saving))
    good = grid[slowdown(grid, saving) <= 1.01 * least]
    young, daly = (_steps(saving, formula) for formula in (young_interval, daly_interval))
    return SaveInterval(best, young, daly, min([best, *good[:1].tolist()]), max([best, *good[-1:].tolist()]), 1 / least)


def young_interval(dump: float, mtbf: float) -> float:
    """Return Young's (1974) optimal seconds between saves, √(2·dump·mtbf), if a save takes `dump` seconds."""
    return math.sqrt(2 * dump * mtbf)


def daly_interval(dump: float, mtbf: float) -> float:
    """Return Daly's (2006) refinement of `young_interval`, in seconds of work between saves of `dump` seconds."""
    if dump >= 2 * mtbf:
        return mtbf
    ratio = dump / (2 * mtbf)
    return young_interval(dump, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - dump


def _steps(saving: SaveCosts, formula: Callable[[float, float], float]) -> int:
    return max(1, round(formula(saving.stall, saving.mtbf) / saving.step)) if saving.stall else 1
