"""What surviving failures costs in time: run time by cause, goodput, and how often to save.

Seconds come in as numbers; nothing here reads a clock or a history.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """T = solve + dump + rework + restart (Daly 2006), in seconds.

    Rework is the iteration cost times the seconds of an iteration, and negative where a perturbation happened to help.
    """

    solve: float
    dump: float = 0.0
    rework: float = 0.0
    restart: float = 0.0

    def __post_init__(self) -> None:
        for name in ("solve", "dump", "restart"):
            _at_least_zero(f"time to {name}", getattr(self, name))

    @property
    def total(self) -> float:
        return self.solve + self.dump + self.rework + self.restart

    @property
    def fractions(self) -> dict[str, float]:
        """The share of each cause in the total; they add up to 1."""
        total = _positive("total run time", self.total)
        return {cause: seconds / total for cause, seconds in asdict(self).items()}


def goodput(committed_steps: int, wall_seconds: float) -> float:
    """Committed logical steps per second of wall clock; a step that failed and was done again counts once."""
    return _at_least_zero("number of committed steps", committed_steps) / _positive("wall time", wall_seconds)


def young_interval(dump: float, mtbf: float) -> float:
    """Young (1974): seconds of work between saves, √(2 δ M), for a dump time δ far below the mean time between failures M."""
    return math.sqrt(2 * _positive("dump time", dump) * _positive("mean time between failures", mtbf))


def daly_interval(dump: float, mtbf: float) -> float:
    """Daly (2006), to higher order: √(2δM) [1 + √(δ/2M)/3 + (δ/2M)/9] - δ, and M where a dump takes 2M or more."""
    young = young_interval(dump, mtbf)
    if dump >= 2 * mtbf:
        return mtbf
    ratio = dump / (2 * mtbf)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - dump


def expected_run_time(
    interval: npt.ArrayLike, *, solve: float, dump: float, mtbf: float, restart: float = 0.0
) -> Floats:
    """Daly (2006): M e^(R/M) (e^((τ+δ)/M) - 1) solve/τ, with failures as a Poisson process; elementwise in τ."""
    work = np.asarray(interval, dtype=np.float64)
    if not np.all(work > 0):
        raise BadInput(f"an interval of {np.min(work):g} s between saves does no work: give more than 0")
    mean = _positive("mean time between failures", mtbf)
    _at_least_zero("time to dump", dump)
    _at_least_zero("time to restart", restart)
    with np.errstate(over="ignore"):  # intervals so long that no segment is ever finished: infinite is the answer
        factor = np.exp(restart / mean) * np.expm1((work + dump) / mean)
        return np.asarray(mean * factor * _positive("time to solve", solve) / work)


def expected_waste(interval: npt.ArrayLike, *, dump: float, mtbf: float, restart: float = 0.0) -> Floats:
    """The fraction of the expected run time that is not solving: 1 - solve/T."""
    return np.asarray(1 - 1 / expected_run_time(interval, solve=1.0, dump=dump, mtbf=mtbf, restart=restart))


def _positive(what: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadInput(f"the {what} is {value:g}: give a positive, finite number")
    return value


def _at_least_zero(what: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise BadInput(f"the {what} is {value:g}: give a finite number of 0 or more")
    return value
