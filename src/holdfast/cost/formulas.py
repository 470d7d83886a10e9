"""Formulas of the cost of failures: goodput, expected run time, and the save intervals of Young and Daly. Pure."""

import math

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput


def goodput(committed_steps: int, wall_seconds: float) -> float:
    """Return committed steps per second of wall clock; a step that was repeated counts once."""
    return _at_least_zero("number of committed steps", committed_steps) / _positive("wall time", wall_seconds)


def young_interval(dump: float, mtbf: float) -> float:
    """Return Young's (1974) seconds of work between saves, √(2 δ M), for a dump time δ far below the mean time M."""
    return math.sqrt(2 * _positive("dump time", dump) * _positive("mean time between failures", mtbf))


def daly_interval(dump: float, mtbf: float) -> float:
    """Return Daly's (2006) interval: √(2δM) [1 + √(δ/2M)/3 + (δ/2M)/9] - δ, and M if a dump takes 2M or more."""
    young = young_interval(dump, mtbf)
    if dump >= 2 * mtbf:
        return mtbf
    ratio = dump / (2 * mtbf)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - dump


def expected_run_time(
    interval: npt.ArrayLike, *, solve: float, dump: float, mtbf: float, restart: float = 0.0
) -> Floats:
    """Return Daly's (2006) M e^(R/M) (e^((τ+δ)/M) - 1) solve/τ, with failures as a Poisson process; elementwise in τ."""
    work = np.asarray(interval, dtype=np.float64)
    if not np.all(work > 0):
        raise BadInput(f"the interval between saves must be greater than 0 (got {np.min(work):g} s).")
    mean = _positive("mean time between failures", mtbf)
    _at_least_zero("time to dump", dump)
    _at_least_zero("time to restart", restart)
    with np.errstate(over="ignore"):  # infinite if no segment is ever finished
        factor = np.exp(restart / mean) * np.expm1((work + dump) / mean)
        return np.asarray(mean * factor * _positive("time to solve", solve) / work)


def expected_waste(interval: npt.ArrayLike, *, dump: float, mtbf: float, restart: float = 0.0) -> Floats:
    """Return the fraction of the expected run time that is not solving: 1 - solve/T."""
    return np.asarray(1 - 1 / expected_run_time(interval, solve=1.0, dump=dump, mtbf=mtbf, restart=restart))


def _positive(what: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadInput(f"the {what} must be positive and finite (got {value:g}).")
    return value


def _at_least_zero(what: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise BadInput(f"the {what} must be finite and 0 or more (got {value:g}).")
    return value
