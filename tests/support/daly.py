"""Daly's formula (2006) for the expected run time, as an independent check of advice and simulations."""

import numpy as np
import numpy.typing as npt


def expected_run_time(
    interval: npt.ArrayLike, *, solve: float, dump: float, mtbf: float, restart: float = 0.0
) -> npt.NDArray[np.float64]:
    """Return the expected seconds of a job with `solve` seconds of work, for each `interval` between saves."""
    work = np.asarray(interval, dtype=np.float64)
    with np.errstate(over="ignore"):  # infinite if no segment is ever finished
        factor = np.exp(restart / mtbf) * np.expm1((work + dump) / mtbf)
        return np.asarray(mtbf * factor * solve / work)
