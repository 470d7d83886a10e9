"""Measure how fast an iteration converges: its contraction rate c and its effective distance D to the optimum.

Theorem 3.2 needs c and D such that the distance of the unperturbed run, d[k] = ‖x[k] - x*‖, falls as D·c^k. Its bound
holds for every D below all d[k] c^-k. The largest such D makes the bound tight: it is the part of x[0] - x* in the
slowest direction. ‖x[0] - x*‖ is larger if x[0] has faster directions as well. With that distance the bound would be
too small: a perturbation in the slowest direction costs more.

Proof: let f be a c-contraction (every linear iteration with ‖A‖ ≤ c is, and gradient descent on a smooth strongly
convex function). Then ‖y[k] - x[k]‖ ≤ c^k Δ. If the unperturbed run first has d[K] < ε, and D ≤ d[K] c^-K < ε c^-K,
then m iterations later ‖y - x*‖ ≤ c^m (d[K] + c^K Δ) < c^m ε (1 + Δ/D), which is below ε as soon as m ≥ log(1 + Δ/D) /
log(1/c). So the measured cost is at most the bound, rounded up.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.errors import BadInput


@dataclass(frozen=True, slots=True)
class Rate:
    """The convergence of an iteration whose distance to the optimum after k steps is `distance * c**k`."""

    c: float
    distance: float


def fitted_rate(distances: npt.ArrayLike, window: slice | None = None) -> Rate:
    """Fit a convergence rate to the distances from the optimum, by least squares of their logarithms over iterations.

    Only the iterations in `window` are used, by default the last half. End the window before the distances flatten
    at the precision with which the optimum is known."""
    logs = _logs(distances)
    steps = np.arange(len(logs))[window or slice(len(logs) // 2, None)]
    if len(steps) < 2:
        raise BadInput(f"{len(steps)} of {len(logs)} distances lie in the window: a slope needs 2 or more")
    centred = steps - steps.mean()
    slope = float(centred @ logs[steps] / (centred @ centred))
    # On a linear iteration with the largest eigenvalues λ1 and λ2, c is too small by an error that vanishes as (λ2/λ1)^2k.
    return _rate(slope, float(np.min(logs[steps] - slope * steps)))


def worst_rate(distances: npt.ArrayLike) -> Rate:
    """Return the slowest convergence rate in a trajectory: `c` is the largest ratio of successive `distances`.

    These are the distances to the optimum after each iteration k. The `distance` of the result is the largest number D
    for which D·c^k never exceeds them."""
    logs = _logs(distances)
    if len(logs) < 2:
        raise BadInput("a single distance has no ratio: give the trajectory 2 iterations or more")
    slope = float(np.max(np.diff(logs)))
    return _rate(slope, float(np.min(logs - slope * np.arange(len(logs)))))


# Updates the sums of 1, t, t², log s and t log s, where t ≤ 0 counts steps back from now, when one step has passed.
_ONE_STEP_ON = np.array([[1, 0, 0, 0, 0], [-1, 1, 0, 0, 0], [1, -2, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, -1, 1]])


class OnlineRate:
    """An estimate of the convergence rate of a running iteration with unknown optimum, from the lengths of its steps.

    The step lengths are s[k] = ‖x[k+1] - x[k]‖. Once the slowest direction dominates, they shrink as the distance does,
    s[k+1] ≈ c s[k], and the distance is the sum of all future steps: ‖x[k+1] - x*‖ ≈ c s[k] / (1 - c). The slope of log
    s is fitted by least squares, with a weight that falls to 1/e after `memory` steps: noise averages out, and early
    steps are forgotten.
    """

    def __init__(self, memory: float = 50.0) -> None:
        if not memory > 1:
            raise BadInput(f"memory must be greater than 1 (got {memory}).")
        self._age = math.exp(-1 / memory) * _ONE_STEP_ON
        self._sums = np.zeros(5)

    def observe(self, step_length: float) -> None:
        """Add the distance that the newest iteration has moved the parameters; a distance of 0 is ignored."""
        if not 0 <= step_length < math.inf:
            allowed = "The length of a step must be finite and not negative"
            raise BadInput(f"{allowed} (got {step_length}): the iteration has diverged.")
        if step_length > 0:
            log = math.log(step_length)
            self._sums = self._age @ self._sums + [1.0, 0.0, 0.0, log, 0.0]

    @property
    def rate(self) -> Rate | None:
        """The estimated convergence rate c and distance to the optimum; None before two steps were observed.

        If the steps do not become shorter, the distance is infinite."""
        one, t, tt, log, t_log = (float(total) for total in self._sums)
        spread = one * tt - t**2
        if spread <= 0:
            return None
        slope = (one * t_log - t * log) / spread
        c, newest = math.exp(slope), math.exp((log - slope * t) / one)
        return Rate(c, c * newest / -math.expm1(slope) if slope < 0 else math.inf)


def _logs(distances: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(distances, dtype=np.float64)
    if values.ndim != 1 or not np.all((values > 0) & np.isfinite(values)):
        raise BadInput("distances must be one row of positive numbers: cut the trajectory where it reaches the optimum")
    return np.log(values)


def _rate(log_c: float, log_distance: float) -> Rate:
    if log_distance > math.log(np.finfo(np.float64).max):
        raise BadInput("the tail falls so fast that, traced back to iteration 0, it overflows: count from a later one")
    return Rate(math.exp(log_c), math.exp(log_distance))
