"""Measure how fast an iteration converges: its contraction rate c and its effective distance D to the optimum.

Theorem 3.2 needs c and D such that the distance of the unperturbed run, d[k] = ‖x[k] - x*‖, falls as D·c^k. Its bound
holds for every D below all d[k] c^-k, and the largest such D makes the bound tight. Proof: if f is a c-contraction, then
‖y[k] - x[k]‖ ≤ c^k Δ. If the unperturbed run first has d[K] < ε, and D ≤ d[K] c^-K, then m iterations later ‖y - x*‖ ≤
c^m (d[K] + c^K Δ) < c^m ε (1 + Δ/D), which is below ε as soon as m ≥ log(1 + Δ/D) / log(1/c).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of convergence: after k iterations, the distance to the optimum is about `distance * c**k`."""

    c: float
    distance: float


def fitted_rate(distances: npt.ArrayLike, window: slice | None = None) -> Rate:
    """Return the average convergence rate of a run, as a `Rate` with the fields `c` and `distance`.

    `distances[k]` is the distance to the optimum after iteration k. The result is a least-squares fit through the
    logarithms of the distances in the slice `window`, by default the last half. If the optimum is
    known only approximately, the distances stop falling at some point: end the window before this point."""
    logs = _logs(distances)
    steps = np.arange(len(logs))[window or slice(len(logs) // 2, None)]
    if len(steps) < 2:
        raise BadInput(f"{len(steps)} of {len(logs)} distances lie in the window: a slope needs 2 or more")
    centred = steps - steps.mean()
    slope = float(centred @ logs[steps] / (centred @ centred))
    # On a linear iteration with the largest eigenvalues λ1 and λ2, c is too small by an error that vanishes as (λ2/λ1)^2k.
    return _rate(slope, float(np.min(logs[steps] - slope * steps)))


def worst_rate(distances: npt.ArrayLike) -> Rate:
    """Return the slowest convergence rate in a run, as a `Rate` with the fields `c` and `distance`.

    `distances[k]` is the distance to the optimum after iteration k. In the result, `c` is the largest ratio
    `distances[k + 1] / distances[k]`. `distance` is the largest D such that D·c^k is never larger than
    `distances[k]`."""
    logs = _logs(distances)
    if len(logs) < 2:
        raise BadInput("a single distance has no ratio: give the trajectory 2 iterations or more")
    slope = float(np.max(np.diff(logs)))
    return _rate(slope, float(np.min(logs - slope * np.arange(len(logs)))))


def _logs(distances: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(distances, dtype=np.float64)
    if values.ndim != 1 or not np.all((values > 0) & np.isfinite(values)):
        raise BadInput("distances must be one row of positive numbers: cut the trajectory where it reaches the optimum")
    return np.log(values)


def _rate(log_c: float, log_distance: float) -> Rate:
    if log_distance > math.log(np.finfo(np.float64).max):
        raise BadInput("the tail falls so fast that, traced back to iteration 0, it overflows: count from a later one")
    return Rate(math.exp(log_c), math.exp(log_distance))
