"""Estimate from an unperturbed run how fast a workload converges: c and D in Theorem 3.2 of the SCAR paper.

Theorem 3.2 bounds costs for an iteration f with ‖f(x) - f(y)‖ ≤ c ‖x - y‖. The steps of a run are such distances,
between one state and the next, so c is the largest ratio of a step to the step before. This needs no optimum. A c
fitted to the distances from a late iterate would depend on which iterate is taken: for logistic regression it is 0.984,
0.992 and 0.995 at 3, 10 and 30 times the length of the run.

D must not exceed any ‖x[k] - x*‖ c^-k. The optimum x* is unknown, so a later iterate x[F] takes its place. The triangle
inequality gives ‖x[k] - x[F]‖ ≤ ‖x[k] - x*‖ + ‖x[F] - x*‖ ≤ ‖x[k] - x*‖ (1 + c^(F-k)). For any F, the quotient
‖x[k] - x[F]‖ / (1 + c^(F-k)) is therefore never too large.

If some step is longer than the step before, as happens with noise, no c below 1 was observed and nothing is proved.
Then c is fitted to the distances from x[F], and given with its range over several F.
"""

from dataclasses import dataclass

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.simulate.trajectory import Trajectory, continue_training
from holdfast.theory.bounds import full_size
from holdfast.theory.rate import Rate, fitted_rate
from holdfast.workloads.workload import Arrays, Workload, norm_order

FAR = (1.5, 2.0, 3.0)  # times the run's length, of the iterates that take the optimum's place; the last one is used


@dataclass(frozen=True, slots=True)
class Contraction(Rate):
    """A convergence rate, `proved` if the trajectory satisfies the assumptions of Theorem 3.2 (SCAR paper).

    Otherwise it was fitted, and lies between `low` and `high`."""

    proved: bool
    low: float
    high: float

    @property
    def words(self) -> str:
        if self.proved:
            return f"c = {self.c:.4f}, the largest ratio of two consecutive steps"
        return (
            f"c = {self.c:.4f} ({self.low:.4f} to {self.high:.4f}, depending on the iterate taken as the optimum), fitted, "
            "because not every step is shorter than the one before: nothing is proved for this c"
        )


def contraction(workload: Workload, run: Trajectory) -> Contraction:
    """Estimate the convergence rate of a workload from its unperturbed run."""
    pairs = zip(run.states[1:], run.states[:-1], strict=True)
    steps = np.array([_distance(workload, after, before) for after, before in pairs])
    worst = float(np.max(steps[1:] / steps[:-1])) if len(steps) > 1 and steps.all() else 1.0
    if worst < 1:
        end = round(FAR[-1] * run.length)
        distances = _distances(workload, run, continue_training(workload, run.states[-1], run.length, end))
        k = np.arange(len(distances))
        with np.errstate(divide="ignore"):  # the largest D that is never too large, as the module explains
            logs = np.log(distances) - np.log1p(worst ** (end - k)) - k * np.log(worst)
        return Contraction(worst, float(np.exp(np.min(logs))), True, worst, worst)
    far, at, rates = run.states[-1], run.length, list[Rate]()
    for times in FAR:
        end = max(round(times * run.length), at + 1)
        far, at = continue_training(workload, far, at, end), end
        rates.append(fitted_rate(_distances(workload, run, far), slice(0, None)))
    all_c = [rate.c for rate in rates]
    return Contraction(rates[-1].c, rates[-1].distance, False, min(all_c), max(all_c))


def _distances(workload: Workload, run: Trajectory, far: Arrays) -> Floats:
    return np.array([_distance(workload, state, far) for state in run.states])


def _distance(workload: Workload, one: Arrays, other: Arrays) -> float:
    return full_size(workload.norm(workload.blocks, one, other), norm_order(workload))
