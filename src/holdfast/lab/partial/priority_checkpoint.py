"""Figures 8 and C.2: which blocks to save when a save may hold only some, at the same bytes per iteration."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import ConfidenceInterval, paired, reduction
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial.comparison import PanelComparison, compare_strategies
from holdfast.lab.partial.cost_report import cost_result, draw_late_failures, draw_means, draw_paper_range, panel_grid
from holdfast.lab.partial.explanations import explain_reduction
from holdfast.lab.plot_style import COLOURS, MARKERS
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = Fraction(1, 2)
FRACTIONS = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
RANKINGS = ("priority", "round", "random")
BEYOND = ("relative", "threshold")  # not in the paper; compared at the smallest fraction
PAPER = (0.78, 0.95)
CAPTION = (
    "The cost of a failure that takes half of the parameters, in iterations, over how often checkpoints are saved, all at "
    "the same bytes per iteration: means with 95 % confidence intervals. Dotted (late failures): only failures after the "
    "first full checkpoint. Dashed: full checkpoints and full recovery."
)
IN_PAPER = "Yellow: where the paper's reductions would put priority at the highest frequency."


def strategy(ranking: str, fraction: Fraction, interval: int) -> Strategy:
    """Return partial checkpoints by `ranking`, and partial recovery of the lost half."""
    policy = Policy(ranking=ranking, interval=interval, fraction=fraction)
    return Strategy(policy=policy, recovery="partial", lost=LOST)


def traditional(interval: int) -> Strategy:
    """Return full checkpoints with full recovery."""
    return Strategy(policy=Policy(ranking="full", interval=interval), recovery="full", lost=LOST)


def run(options: Options, meter: Meter) -> Result:
    """Compare rankings at rising frequencies on every panel, or without claims on the user's own model."""
    trials, interval = options.trial_count(full=100, quick=8), options.interval
    baseline = traditional(interval)
    smaller = [strategy(name, fraction, interval) for name in RANKINGS for fraction in FRACTIONS]
    beyond = [strategy(name, FRACTIONS[-1], interval) for name in BEYOND]
    panels = compare_strategies(options, meter, trials, [baseline, *smaller, *beyond], baseline)
    claims = [] if options.workload is not None else _claims(panels, interval)
    return cost_result(
        "priority-checkpoint",
        options,
        {"trials": trials, "interval": interval, "lost": str(LOST)},
        panels,
        claims,
        [
            *(_explained(panel, interval, has_claims=bool(claims)) for panel in panels),
            *(_ranked(panel, interval) for panel in panels),
        ],
        figure(panels, interval, paper=bool(claims)),
        f"{CAPTION} {IN_PAPER}" if claims else CAPTION,
    )


def _claims(panels: Sequence[PanelComparison], interval: int) -> list[Claim]:
    claims = [claim for panel in panels for claim in (_reduction(panel, interval), _falls(panel, interval))]
    random_rises = Claim(
        id="random-rises",
        claim="share of panels in which the mean cost of random at 8x is above that at 1x",
        source="figure 8: nearly always",
        expected=(0.5, 1),
        measured=sum(_ratio(panel, "random", interval).value > 1 for panel in panels) / len(panels),
    )
    return [*claims, random_rises]


def _reduction(panel: PanelComparison, interval: int) -> Claim:
    row = panel.row(strategy("priority", FRACTIONS[-1], interval))
    return Claim(
        id=f"{panel.panel}-priority",
        claim=f"{panel.label}: reduction of the cost by priority 1/8 checkpoints at 8x, 1/2 lost, against full recovery",
        source="section 5.4",
        expected=PAPER,
        measured=row["reduction"],
        interval=(row["reduction_low"], row["reduction_high"]),
    )


def _falls(panel: PanelComparison, interval: int) -> Claim:
    ratio = _ratio(panel, "priority", interval)
    return Claim(
        id=f"{panel.panel}-priority-falls",
        claim=f"{panel.label}: mean cost of priority at 8x, as a fraction of that at 1x",
        source="figure 8",
        expected=(None, 1),
        measured=ratio.value,
        interval=(ratio.low, ratio.high),
    )


def _ratio(panel: PanelComparison, ranking: str, interval: int) -> ConfidenceInterval:
    """Return the mean cost at the highest frequency over that of full checkpoints."""
    costs_of = panel.measurement.costs_of
    often, seldom = (costs_of(strategy(ranking, f, interval)).cost for f in (FRACTIONS[-1], FRACTIONS[0]))
    value, low, high = reduction(*paired(often, seldom))
    return ConfidenceInterval(1 - value, 1 - high, 1 - low)


def _explained(panel: PanelComparison, interval: int, *, has_claims: bool) -> str:
    smallest = strategy("priority", FRACTIONS[-1], interval)
    return explain_reduction(
        panel, smallest, traditional(interval), _reduction(panel, interval) if has_claims else None
    )


def _ranked(panel: PanelComparison, interval: int) -> str:
    """Return the mean costs of all policies at the smallest fraction, including those that are not in the paper."""
    costs = {name: panel.row(strategy(name, FRACTIONS[-1], interval))["cost_mean"] for name in (*RANKINGS, *BEYOND)}
    order = ", ".join(f"{name} {cost:.2f}" for name, cost in sorted(costs.items(), key=lambda item: item[1]))
    return f"{panel.label}: mean cost at 1/8 and 8x, cheapest first: {order}."


def figure(panels: Sequence[PanelComparison], interval: int, *, paper: bool) -> "Figure":
    """Draw mean costs with 95 % confidence intervals over the frequency of checkpoints."""

    def draw(axes: "Axes", panel: PanelComparison) -> None:
        for name, shift in zip(RANKINGS, (-0.1, 0, 0.1), strict=True):
            rows = [panel.row(strategy(name, fraction, interval)) for fraction in FRACTIONS]
            draw_means(axes, rows, over="frequency", name=name, shift=shift)
        by_fraction = [strategy("priority", fraction, interval) for fraction in FRACTIONS]
        draw_late_failures(axes, panel, by_fraction, shift=-0.1)
        for name in BEYOND:
            cost = panel.row(strategy(name, FRACTIONS[-1], interval))["cost_mean"]
            place = [len(FRACTIONS) - 0.75]
            axes.plot(place, [cost], marker=MARKERS[name], linestyle="", color=COLOURS[name], label=name)
        level = panel.row(traditional(interval))["cost_mean"]
        axes.axhline(level, color=COLOURS["full recovery"], linestyle="--", label="full checkpoint and recovery")
        if paper:
            draw_paper_range(axes, len(FRACTIONS) - 1, *(level * (1 - end) for end in reversed(PAPER)))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))  # a cost may be negative

    return panel_grid(panels, draw, across="frequency of checkpoints")


EXPERIMENT = Experiment(
    name="priority-checkpoint",
    title="iteration costs when partial checkpoints hold what moved most, the longest unsaved, or a random choice",
    source="SCAR, figures 8 and C.2",
    has_panels=True,
    accepts_workload=True,
    run=run,
)
