"""Figures 7 and C.1 of the SCAR paper: after a failure, restore all blocks, or only the lost blocks."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import mean, paired
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial import cost_report
from holdfast.lab.partial.comparison import PanelComparison, compare_strategies
from holdfast.lab.result import Claim, Result, Value
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1))
PAPER = {Fraction(1, 4): (0.59, 0.89), Fraction(1, 2): (0.31, 0.62), Fraction(3, 4): (0.12, 0.42)}
CAPTION = (
    "The mean cost of a failure in iterations, with its 95 % confidence interval, by the part of the blocks that is lost. "
    "Dotted lines: late failures only."
)
ROWS = (
    "This table has a row for 1/2 of the blocks of each panel. It has rows for 1/4 and 3/4 only where the measured reduction "
    "is outside the expected range."
)
IN_PAPER = "Yellow areas: the cost of partial recovery if it had the reductions that the SCAR paper reports."


def strategy(recovery: str, lost: Fraction, interval: int) -> Strategy:
    return Strategy(policy=Policy(ranking="full", interval=interval), recovery=recovery, lost=lost)


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: compare full with partial recovery, on the models of the SCAR paper or on the user's own."""
    trials, interval = options.trial_count(full=100, quick=8), options.interval
    strategies = [strategy(how, lost, interval) for lost in LOST for how in ("full", "partial")]
    panels = compare_strategies(options, meter, trials, strategies, strategies[0])
    has_claims, claims = options.workload is None, []
    for panel in panels if has_claims else ():
        words = f"{panel.label}: how often the mean cost falls, from all blocks lost to 3/4, to 1/2 and to 1/4"
        count = sum(mean(_saved(panel, *step, interval)).value > 0 for step in pairwise(LOST))
        claims.append(Claim(f"{panel.panel}-falls", words, "figure 7", (3, 3), count))
        claims += [_reduction(panel, lost, interval) for lost in PAPER]
    return cost_report.cost_result(
        "partial-recovery",
        options,
        {"trials": trials, "iterations between two checkpoints": interval},
        panels,
        claims,
        [
            cost_report.reduction_remark(options),
            *([ROWS] if has_claims else []),
            *(line for panel in panels for line in rises(panel, interval)),
        ],
        [cost_report.reduction_table(options, _reduction_rows(panels, interval, has_claims=has_claims))],
        figure(panels, interval, paper=has_claims),
        f"{CAPTION} {IN_PAPER}" if has_claims else CAPTION,
    )


def _reduction(panel: PanelComparison, lost: Fraction, interval: int) -> Claim:
    row = panel.row(strategy("partial", lost, interval))
    words = f"{panel.label}: reduction by partial recovery if {lost} of the blocks are lost"
    ends = row["reduction_low"], row["reduction_high"]
    return Claim(f"{panel.panel}-{lost}", words, "section 5.3", PAPER[lost], row["reduction"], ends)


def _saved(panel: PanelComparison, less: Fraction, more: Fraction, interval: int) -> Floats:
    larger, smaller = paired(_partial(panel, more, interval), _partial(panel, less, interval))
    return larger - smaller


def _partial(panel: PanelComparison, lost: Fraction, interval: int) -> Floats:
    return panel.measurement.costs_of(strategy("partial", lost, interval)).cost


def _reduction_rows(panels: Sequence[PanelComparison], interval: int, *, has_claims: bool) -> list[list[Value]]:
    baseline = strategy("full", Fraction(1), interval)
    rows = []
    for panel in panels:
        for lost in PAPER:
            claim = _reduction(panel, lost, interval) if has_claims else None
            if lost == Fraction(1, 2) or (claim is not None and not claim.holds):
                rows.append(cost_report.reduction_row(panel, strategy("partial", lost, interval), baseline, claim))
    return rows


def rises(panel: PanelComparison, interval: int) -> list[str]:
    """Return a remark for each case in which losing fewer blocks costs more than losing more blocks."""
    lines = []
    for less, more in pairwise(LOST):
        extra = mean(-_saved(panel, less, more, interval))
        if not extra.value >= 0:  # NaN if no trial converged
            continue
        ours, theirs = _partial(panel, less, interval), _partial(panel, more, interval)
        both = np.isfinite(ours) & np.isfinite(theirs)
        ours, theirs, early = ours[both], theirs[both], panel.measurement.steps[both] < interval
        line = (
            f"{panel.label}: under partial recovery, losing {less} of the blocks costs {extra.value:.2f} iterations "
            f"({extra.ends()}) more than losing {'all' if more == 1 else more}"
        )
        if early.any() and not early.all():
            line += (
                f". Early failures cost {ours[early].mean():.2f} and {theirs[early].mean():.2f} iterations, and late failures "
                f"{ours[~early].mean():.2f} and {theirs[~early].mean():.2f}"
            )
        lines.append(f"{line}.")
    return lines


def figure(panels: Sequence[PanelComparison], interval: int, *, paper: bool) -> "Figure":
    """Plot the mean cost of a failure against the fraction of parameters lost; `paper` adds the SCAR paper's ranges."""

    def draw(axes: "Axes", panel: PanelComparison) -> None:
        for how, shift in (("full", -0.05), ("partial", 0.05)):
            rows = [panel.row(strategy(how, lost, interval)) for lost in LOST]
            cost_report.draw_means(axes, rows, over="lost", name=f"{how} recovery", shift=shift)
        cost_report.draw_late_failures(axes, panel, [strategy("partial", lost, interval) for lost in LOST], shift=0.05)
        full = panel.row(strategy("full", LOST[0], interval))["cost_mean"]
        for place, lost in enumerate(LOST if paper else ()):
            if lost in PAPER:
                cost_report.draw_paper_range(axes, place, *(full * (1 - end) for end in reversed(PAPER[lost])))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))  # a cost may be negative

    return cost_report.panel_grid(panels, draw, across="fraction of the parameters lost")


EXPERIMENT = Experiment(
    name="partial-recovery",
    title="iteration costs of full and partial recovery when 1/4, 1/2, 3/4 or all parameters are lost",
    source="SCAR, figures 7 and C.1",
    has_panels=True,
    accepts_workload=True,
    run=run,
)
