"""Formulas for the cost of failures: goodput, expected run time, and the save intervals of Young and Daly."""

import math

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.errors import BadInput


def goodput(committed_steps: int, wall_seconds: float) -> float:
    """Return the committed steps per second of wall clock. A step that was trained twice counts once."""
    return _at_least_zero("number of committed steps", committed_steps) / _positive("wall time", wall_seconds)


def young_interval(dump: float, mtbf: float) -> float:
    """Return Young's (1974) optimal seconds between saves, √(2·dump·mtbf), if a save takes `dump` seconds."""
    return math.sqrt(2 * _positive("dump time", dump) * _positive("mean time between failures", mtbf))


def daly_interval(dump: float, mtbf: float) -> float:
    """Return Daly's (2006) optimal seconds of work between saves, a refinement of `young_interval`.

    A save takes `dump` seconds. If `dump` is at least twice `mtbf`, the result is `mtbf`."""
    young = young_interval(dump, mtbf)
    if dump >= 2 * mtbf:
        return mtbf
    ratio = dump / (2 * mtbf)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - dump


def expected_run_time(
    interval: npt.ArrayLike, *, solve: float, dump: float, mtbf: float, restart: float = 0.0
) -> Floats:
    """Return the expected run time in seconds for each `interval` between saves, by Daly's formula (2006).

    The job has `solve` seconds of work, a save takes `dump` seconds and a restart `restart` seconds. Failures are a
    Poisson process with a mean of `mtbf` seconds between them."""
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
    """Return the expected fraction of time lost to saves and failures, for each `interval` between saves in seconds.

    A save takes `dump` seconds, and a restart `restart` seconds."""
    return np.asarray(1 - 1 / expected_run_time(interval, solve=1.0, dump=dump, mtbf=mtbf, restart=restart))


def _positive(what: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise BadInput(f"the {what} must be positive and finite (got {value:g}).")
    return value


def _at_least_zero(what: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise BadInput(f"the {what} must be finite and 0 or more (got {value:g}).")
    return value
