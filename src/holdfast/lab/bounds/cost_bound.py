"""The bound of Theorem 3.2 (SCAR paper) on the cost of perturbations, computed from an unperturbed run and compared with measured costs.

The theorem holds for an iteration f with ‖f(x) - f(y)‖ ≤ c ‖x - y‖, so c is the largest ratio of a step of the run to the
step before. D must not exceed any ‖x[k] - x*‖ c^-k. A later iterate x[F] takes the place of the unknown optimum x*: by
the triangle inequality, ‖x[k] - x[F]‖ / (1 + c^(F-k)) never exceeds ‖x[k] - x*‖. If some step is longer than the step
before, as happens with noise, nothing is proved: c is fitted to the distances from x[F], with its range over several F.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.lab.plot_style import new_figure
from holdfast.lab.result import Claim, Row
from holdfast.lab.simulate.lanes import Trajectory, continue_training
from holdfast.theory.bounds import full_size, iteration_cost_bound
from holdfast.theory.rate import Rate, fitted_rate
from holdfast.workloads.workload import Arrays, Workload, norm_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = (1.5, 2.0, 3.0)  # times the run's length, of the iterates that take the optimum's place; the last one is used


@dataclass(frozen=True, slots=True)
class Contraction(Rate):
    """The factor c by which a run's distance from the optimum shrinks per iteration.

    The true c lies between `low` and `high`."""

    proved: bool  # the run satisfies the assumptions of Theorem 3.2; otherwise c was fitted
    low: float
    high: float

    @property
    def words(self) -> str:
        """Text for a report: how c was found."""
        if self.proved:
            return "largest ratio of the changes of the state in two consecutive iterations"
        return f"fitted, between {self.low:.4f} and {self.high:.4f}; nothing is proved for this c"


def contraction(workload: Workload, run: Trajectory) -> Contraction:
    """Estimate the rate of convergence of a workload from `run`, a run without perturbations."""
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


@dataclass(frozen=True, slots=True, eq=False)
class PerturbedTrials:
    """Training runs whose weights were perturbed, and how many additional iterations each run needed to converge."""

    kind: str
    sizes: Floats  # norms, as (trials, perturbations of a trial)
    steps: npt.NDArray[np.int64]  # iterations of the perturbations
    costs: Floats

    def bounds(self, rate: Rate) -> Floats:
        """Return for each trial the most additional iterations that Theorem 3.2 of the SCAR paper allows.

        `rate` is the rate of convergence of the run without perturbations."""
        return iteration_cost_bound(rate.c, rate.distance, self.sizes, self.steps)

    def aggregate(self, rate: Rate) -> Floats:
        """Return the total perturbation of each trial, in units of the initial distance from the optimum.

        Theorem 3.2 of the SCAR paper calls the total perturbation Δ."""
        return np.asarray(np.expm1(self.bounds(rate) * -np.log(rate.c)))

    def rows(self, rate: Rate) -> list[Row]:
        columns = (self.sizes.sum(axis=-1), self.aggregate(rate), self.costs, self.bounds(rate))
        names = ("size", "aggregate", "cost", "bound")
        return [
            {"kind": self.kind, **dict(zip(names, map(float, values), strict=True))}
            for values in zip(*columns, strict=True)
        ]

    def within(self, rate: Rate) -> float:
        """Return the fraction of trials whose cost is at most one iteration above the bound of Theorem 3.2."""
        return float(np.mean(self.costs <= self.bounds(rate) + 1))

    def closeness(self, rate: Rate) -> Floats:
        """Return each trial's cost divided by its bound from Theorem 3.2 of the SCAR paper."""
        return self.costs / self.bounds(rate)


def within_claim(trials: PerturbedTrials, rate: Rate, source: str, at_least: float) -> Claim:
    """Return the claim that at least the fraction `at_least` of the trials cost at most their bound plus one iteration.

    `source` says who made the claim, such as "Theorem 3.2, figure 5"."""
    strictly = float(np.mean(trials.costs <= trials.bounds(rate)))
    words = (
        f"fraction of {len(trials.costs)} trials ({trials.kind}) whose cost is within the bound, rounded up to a whole "
        f"iteration (without rounding {strictly:.3g})"
    )
    return Claim(f"within-bound-{trials.kind}", words, source, (at_least, 1), trials.within(rate))


def printed_form_remark(groups: Sequence[PerturbedTrials], rate: Rate, start: float) -> str:
    """Return a sentence that says how many trials would exceed the bound as the SCAR paper prints it.

    The printed bound contains `start`, the distance between the start and the optimum; ours contains
    `rate.distance`."""
    literal = Rate(rate.c, start)
    over = sum(int((1 - group.within(literal)) * len(group.costs) + 0.5) for group in groups)
    total = sum(len(group.costs) for group in groups)
    return (
        f"The bound uses the effective distance D = {rate.distance:.4g}, the part of the start's distance {start:.4g} "
        "in the slowest direction, because costs are counted from the measured unperturbed run. "
        f"With D = {start:.4g}, as the theorem is printed, {over} of {total} trials would exceed it."
    )


def cost_figure(groups: Sequence[PerturbedTrials], rate: Rate, title: str) -> "Figure":
    """Draw a plot for each group: costs as points, the bound as a line, both over the size of the perturbation."""
    drawn = new_figure(max(4.2 * len(groups), 4.8), 3.6)
    for axes, group in zip(drawn.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        size = group.aggregate(rate)
        order = np.argsort(size)
        axes.scatter(size, group.costs, s=7, alpha=0.5, linewidths=0, label="trials")
        axes.plot(size[order], group.bounds(rate)[order], color="tab:red", label="bound (Theorem 3.2)")
        axes.set_title(f"{group.kind}, {len(size)} trials")
        axes.set_xlabel("size of the perturbation, Δ/D")
        axes.set_ylabel("iteration cost")
        axes.legend(frameon=False)
    drawn.suptitle(title)
    return drawn


CAPTION = (
    "Each point is a trial: the iterations that a perturbation cost over its size, in units of the distance left to the "
    "optimum. The line is the bound of Theorem 3.2."
)
