"""Figures 7 and C.1: what a failure costs when all goes back to the checkpoint, and when only the lost blocks do."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import mean, paired
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial import cost_figures as prediction
from holdfast.lab.partial.comparison import (
    PanelComparison,
    compare_strategies,
    cost_table,
    criteria,
    unconverged_remarks,
)
from holdfast.lab.partial.cost_figures import draw_late_failures, draw_means, draw_paper_range, panel_grid
from holdfast.lab.partial.explanations import explain_reduction
from holdfast.lab.partial.panels import panel_notes
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1))
PAPER = {Fraction(1, 4): (0.59, 0.89), Fraction(1, 2): (0.31, 0.62), Fraction(3, 4): (0.12, 0.42)}


def strategy(recovery: str, lost: Fraction, interval: int) -> Strategy:
    """Full checkpoints, and one of the two recoveries."""
    return Strategy(policy=Policy(ranking="full", interval=interval), recovery=recovery, lost=lost)


def run(options: Options, meter: Meter) -> Result:
    """Compare full with partial recovery on every panel, or without claims on a workload of the user's own."""
    trials = options.count(full=100, quick=20)
    strategies = [strategy(how, lost, options.interval) for lost in LOST for how in ("full", "partial")]
    panels, own = compare_strategies(options, meter, trials, strategies, strategies[0]), options.workload is not None
    return Result(
        experiment="partial-recovery",
        config={"seed": options.seed, "trials": trials, "interval": options.interval, **criteria(panels)},
        rows=[row for compared in panels for row in compared.rows],
        claims=[] if own else [claim for compared in panels for claim in _claims(compared, options.interval)],
        remarks=[
            *([] if options.quick or own else panel_notes(options.panels)),
            *(line for compared in panels for line in _causes(compared, options.interval, claimed=not own)),
            *unconverged_remarks(panels),
            *prediction.bound_remarks(panels),
        ],
        tables=[cost_table(panels)],
        figures={
            "partial-recovery": figure(panels, options.interval, paper=not own),
            "bound": prediction.bound_figure(panels),
        },
        captions={"partial-recovery": CAPTION if own else f"{CAPTION} {IN_PAPER}", "bound": prediction.BOUND_CAPTION},
    )


def _claims(compared: PanelComparison, interval: int) -> list[Claim]:
    rows = {lost: compared.row(strategy("partial", lost, interval)) for lost in LOST}
    falls = Claim(
        id=f"{compared.panel}-falls",
        claim=f"{compared.label}: of the three steps 1, 3/4, 1/2, 1/4 lost, those in which the mean cost falls",
        source="figure 7",
        expected=(3, 3),
        measured=sum(mean(_saved(compared, *step, interval)).value > 0 for step in pairwise(LOST)),
    )
    return [falls, *(_reduction(compared, lost, rows[lost]) for lost in PAPER)]


def _saved(compared: PanelComparison, less: Fraction, more: Fraction, interval: int) -> Floats:
    """What every trial saves by losing less, of those that converged in both ways."""
    larger, smaller = paired(_partial(compared, more, interval), _partial(compared, less, interval))
    return larger - smaller


def _partial(compared: PanelComparison, lost: Fraction, interval: int) -> Floats:
    return compared.measurement.of(strategy("partial", lost, interval)).cost


def _reduction(compared: PanelComparison, lost: Fraction, row: dict[str, Any]) -> Claim:
    return Claim(
        id=f"{compared.panel}-{lost}",
        claim=f"{compared.label}: reduction of the cost by partial recovery, {lost} lost",
        source="section 5.3",
        expected=PAPER[lost],
        measured=row["reduction"],
        interval=(row["reduction_low"], row["reduction_high"]),
    )


def _causes(compared: PanelComparison, interval: int, *, claimed: bool) -> list[str]:
    """What may explain the reductions: for half lost, and for every other fraction whose claim does not hold."""
    baseline = strategy("full", Fraction(1), interval)
    claims = {lost: _reduction(compared, lost, compared.row(strategy("partial", lost, interval))) for lost in PAPER}
    lines = [
        explain_reduction(compared, strategy("partial", lost, interval), baseline, claim if claimed else None)
        for lost, claim in claims.items()
        if lost == Fraction(1, 2) or (claimed and not claim.holds)
    ]
    return [*lines, *rises(compared, interval)]


def rises(compared: PanelComparison, interval: int) -> list[str]:
    """Each step in which losing less costs more, and which failures make it so: those that go back to the start, or others."""
    return [
        _rise(compared, less, more, interval)
        for less, more in pairwise(LOST)
        if mean(_saved(compared, less, more, interval)).value <= 0
    ]


def _rise(compared: PanelComparison, less: Fraction, more: Fraction, interval: int) -> str:
    ours, theirs = _partial(compared, less, interval), _partial(compared, more, interval)
    both = np.isfinite(ours) & np.isfinite(theirs)
    ours, theirs, early = ours[both], theirs[both], compared.measurement.steps[both] < interval
    extra = mean(-_saved(compared, less, more, interval))
    line = (
        f"{compared.label}: losing {less} costs {extra.value:.2f} iterations ({extra.low:.2f} to {extra.high:.2f}) more than "
        f"losing {'all' if more == 1 else more}"
    )
    if early.all() or not early.any():
        return f"{line}."
    return (
        f"{line}: {ours[early].mean():.2f} against {theirs[early].mean():.2f} in failures before the first full checkpoint, "
        f"{ours[~early].mean():.2f} against {theirs[~early].mean():.2f} in the others."
    )


CAPTION = (
    "What a failure costs, in iterations, over the fraction of the parameters that it takes: means with 95 % confidence "
    "intervals. Dotted, late failures: those after the first full checkpoint alone."
)
IN_PAPER = "Yellow: where the paper's reductions would put partial recovery."


def figure(panels: Sequence[PanelComparison], interval: int, *, paper: bool) -> "Figure":
    """Mean costs with 95 % confidence intervals over the lost fraction, a panel for each workload."""

    def draw(axes: "Axes", compared: PanelComparison) -> None:
        for how, shift in (("full", -0.05), ("partial", 0.05)):
            rows = [compared.row(strategy(how, lost, interval)) for lost in LOST]
            draw_means(axes, rows, over="lost", name=f"{how} recovery", shift=shift)
        draw_late_failures(axes, compared, [strategy("partial", lost, interval) for lost in LOST], shift=0.05)
        full = compared.row(strategy("full", LOST[0], interval))["cost_mean"]
        for place, lost in enumerate(LOST if paper else ()):
            if lost in PAPER:
                draw_paper_range(axes, place, *(full * (1 - end) for end in reversed(PAPER[lost])))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))  # a failure may cost less than nothing

    return panel_grid(panels, draw, across="fraction of the parameters lost")


EXPERIMENT = Experiment(
    name="partial-recovery",
    title="iteration costs of full and partial recovery when 1/4, 1/2, 3/4 or all parameters are lost",
    source="SCAR, figures 7 and C.1",
    panels=True,
    own=True,
    run=run,
)
