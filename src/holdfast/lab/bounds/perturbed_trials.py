"""Measured costs of perturbations against the bound of Theorem 3.2 (SCAR paper): rows, claim, remark and figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats
from holdfast.lab.plot_style import new_figure
from holdfast.lab.result import Claim, Row
from holdfast.theory.bounds import iteration_cost_bound
from holdfast.theory.rate import Rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, eq=False)
class PerturbedTrials:
    """Trials with perturbed states; `sizes[i, j]` is the norm of the perturbation of trial i at iteration `steps[j]`.

    `costs` are the additional iterations that each trial needed."""

    kind: str
    sizes: Floats  # (trials, perturbations of a trial)
    steps: npt.NDArray[np.int64]
    costs: Floats

    def bounds(self, rate: Rate) -> Floats:
        """Return the bound of Theorem 3.2 (SCAR paper) on each trial's cost in iterations, for convergence `rate`."""
        return iteration_cost_bound(rate.c, rate.distance, self.sizes, self.steps)

    def aggregate(self, rate: Rate) -> Floats:
        """Return the total perturbation of each trial (Δ in Theorem 3.2) over the initial distance to the optimum."""
        return np.asarray(np.expm1(self.bounds(rate) * -np.log(rate.c)))

    def rows(self, rate: Rate) -> list[Row]:
        columns = (self.sizes.sum(axis=-1), self.aggregate(rate), self.costs, self.bounds(rate))
        names = ("size", "aggregate", "cost", "bound")
        return [
            {"kind": self.kind, **dict(zip(names, map(float, values), strict=True))}
            for values in zip(*columns, strict=True)
        ]

    def within(self, rate: Rate) -> float:
        """Return the fraction of trials whose cost in whole iterations is at most 1 above the bound of Theorem 3.2."""
        return float(np.mean(self.costs <= self.bounds(rate) + 1))

    def closeness(self, rate: Rate) -> Floats:
        """Return each trial's cost divided by its bound; at most 1 if Theorem 3.2 of the SCAR paper applies."""
        return self.costs / self.bounds(rate)


def within_claim(trials: PerturbedTrials, rate: Rate, source: str, at_least: float) -> Claim:
    """Return the claim that the fraction `at_least` of the trials or more cost at most their bound, rounded up."""
    strictly = float(np.mean(trials.costs <= trials.bounds(rate)))
    words = (
        f"fraction of {len(trials.costs)} trials ({trials.kind}) whose cost is within the bound, rounded up to a whole "
        f"iteration (without rounding {strictly:.3g})"
    )
    return Claim(f"within-bound-{trials.kind}", words, source, (at_least, 1), trials.within(rate))


def printed_form_remark(groups: Sequence[PerturbedTrials], rate: Rate, start: float) -> str:
    """Return a remark on how many trials exceed the bound with the initial distance `start`, as the paper prints it."""
    literal = Rate(rate.c, start)
    over = sum(int((1 - group.within(literal)) * len(group.costs) + 0.5) for group in groups)
    total = sum(len(group.costs) for group in groups)
    return (
        f"The bound uses the effective distance D = {rate.distance:.4g}, the part of the start's distance {start:.4g} "
        "in the slowest direction, because costs are counted from the measured unperturbed run. "
        f"With D = {start:.4g}, as the theorem is printed, {over} of {total} trials would exceed it."
    )


def cost_figure(groups: Sequence[PerturbedTrials], rate: Rate, title: str) -> "Figure":
    """Draw for each group of trials the costs as points and the bound as a line, over the size of the perturbation."""
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
