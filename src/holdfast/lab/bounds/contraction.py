"""How fast a workload contracts: in goes its unperturbed run, out come the c and the D of Theorem 3.2.

Theorem 3.2 bounds costs for an iteration f with ‖f(x) - f(y)‖ ≤ c ‖x - y‖. The steps of a run are such distances, between
one state and the next, so c is taken as the largest ratio of a step to the step before. No optimum is needed for it.

D must not exceed any ‖x[k] - x*‖ c^-k. The optimum x* is out of reach, and a later iterate x[F] stands for it. By the
triangle inequality ‖x[k] - x[F]‖ ≤ ‖x[k] - x*‖ + ‖x[F] - x*‖ ≤ ‖x[k] - x*‖ (1 + c^(F-k)), so ‖x[k] - x[F]‖ / (1 + c^(F-k))
is a distance that is surely not too large, whichever F is chosen.

Where some step is longer than the one before, as under noise, no c below 1 was seen and nothing is proved. Then c is
fitted to the distances from x[F], and depends on F: it is given with the range that it has over several F.
"""

from dataclasses import dataclass

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.simulate.trajectory import Trajectory, continue_training
from holdfast.theory.bounds import full_size
from holdfast.theory.rate import Rate, fitted_rate
from holdfast.workloads.workload import Arrays, Workload, norm_order

FAR = (1.5, 2.0, 3.0)  # iterates so many times as far as the criterion stand for the optimum; the last one is used


@dataclass(frozen=True, slots=True)
class Contraction(Rate):
    """A rate, whether Theorem 3.2 is proved for it, and between which values c lies by other choices of the optimum."""

    proved: bool
    low: float
    high: float

    @property
    def words(self) -> str:
        """The rate for a reader."""
        if self.proved:
            return f"c = {self.c:.4f}, the largest ratio of two steps that follow each other"
        return (
            f"c = {self.c:.4f} ({self.low:.4f} to {self.high:.4f}, by how far away the optimum is taken to be), fitted, since "
            "not every step is shorter than the one before: for this c nothing is proved"
        )


def contraction(workload: Workload, run: Trajectory) -> Contraction:
    """The rate of a workload along its unperturbed run."""
    steps = np.array([_apart(workload, one, other) for one, other in zip(run.states[1:], run.states[:-1], strict=True)])
    worst = float(np.max(steps[1:] / steps[:-1])) if len(steps) > 1 and steps.all() else 1.0
    if worst < 1:
        end = round(FAR[-1] * run.length)
        far = continue_training(workload, run.states[-1], run.length, end)
        return Contraction(worst, _distance(_distances(workload, run, far), worst, end), True, worst, worst)
    return _fitted(workload, run)


def _fitted(workload: Workload, run: Trajectory) -> Contraction:
    """The slope of the distances from a far iterate, and what it is for others."""
    far, at, found = run.states[-1], run.length, list[Rate]()
    for times in FAR:
        end = max(round(times * run.length), at + 1)
        far, at = continue_training(workload, far, at, end), end
        found.append(fitted_rate(_distances(workload, run, far), slice(0, None)))
    all_c = [each.c for each in found]
    return Contraction(found[-1].c, found[-1].distance, False, min(all_c), max(all_c))


def _distance(distances: Floats, c: float, end: int) -> float:
    """The largest D that is surely beneath all distances to the optimum, times c^-k: see above."""
    k = np.arange(len(distances))
    with np.errstate(divide="ignore"):
        logs = np.log(distances) - np.log1p(c ** (end - k)) - k * np.log(c)
    return float(np.exp(np.min(logs)))


def _distances(workload: Workload, run: Trajectory, far: Arrays) -> Floats:
    return np.array([_apart(workload, state, far) for state in run.states])


def _apart(workload: Workload, one: Arrays, other: Arrays) -> float:
    return full_size(workload.norm(workload.blocks, one, other), norm_order(workload))
