"""Figures 8 and C.2 of the SCAR paper: which blocks to save if a save holds only some, at equal bytes per iteration."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import ConfidenceInterval, finite, mean, paired, reduction
from holdfast.lab.experiment import Experiment, Meter, Options
from holdfast.lab.partial import cost_report
from holdfast.lab.partial.comparison import PanelComparison, compare_strategies
from holdfast.lab.plot_style import MARKERS, colour_of
from holdfast.lab.result import Claim, Result, ResultTable, Value
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = Fraction(1, 2)
FRACTIONS = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
RANKINGS = ("priority", "round", "random")
BEYOND = ("relative", "threshold")  # not in the paper; compared at the smallest fraction
PAPER = (0.78, 0.95)
PARTIAL = "both with partial recovery"
REMARK = (
    "In claims on a reduction, a policy with partial recovery is compared with the usual method, which is full checkpoints "
    "with full recovery."
)
OWN_REMARK = (
    "A reduction compares a policy with partial recovery with the usual method, which is full checkpoints with full "
    "recovery."
)
CAPTION = (
    "The mean cost of a failure in iterations, with its 95 % confidence interval, by the frequency of checkpoints. At all "
    "frequencies, checkpoints write the same number of values per iteration. Solid lines: partial recovery, over all "
    "failures. Dotted lines: the same for `priority`, over late failures only. Dashed lines: full checkpoints and full "
    "recovery."
)
IN_PAPER = "Yellow areas: the cost of priority at 8x if it had the reductions that the SCAR paper reports."


def strategy(ranking: str, fraction: Fraction, interval: int) -> Strategy:
    """Return a strategy that saves the fraction `fraction` of the blocks every `fraction * interval` steps.

    `ranking` chooses the blocks of a save. After a failure, only lost blocks are restored."""
    policy = Policy(ranking=ranking, interval=interval, fraction=fraction)
    return Strategy(policy=policy, recovery="partial", lost=LOST)


def traditional(interval: int) -> Strategy:
    return Strategy(policy=Policy(ranking="full", interval=interval), recovery="full", lost=LOST)


def run(options: Options, meter: Meter) -> Result:
    """Run the experiment: compare ways to choose the blocks to save, at several save frequencies."""
    trials, interval = options.trial_count(full=100, quick=8), options.interval
    baseline = traditional(interval)
    smaller = [strategy(name, fraction, interval) for name in RANKINGS for fraction in FRACTIONS]
    beyond_paper = (*BEYOND, *options.policies)
    beyond = [strategy(name, FRACTIONS[-1], interval) for name in beyond_paper]
    panels = compare_strategies(options, meter, trials, [baseline, *smaller, *beyond], baseline)
    claims = [] if options.workload is not None else _claims(panels, interval)
    smallest = strategy("priority", FRACTIONS[-1], interval)
    explained = [
        cost_report.reduction_row(panel, smallest, baseline, _reduction(panel, interval) if claims else None)
        for panel in panels
    ]
    return cost_report.cost_result(
        "priority-checkpoint",
        options,
        {"trials": trials, "iterations between two full checkpoints": interval, "lost": f"{LOST} of the blocks"},
        panels,
        claims,
        [REMARK if claims else OWN_REMARK, cost_report.reduction_remark(options)],
        [
            _ranking_table(options, panels, (*RANKINGS, *beyond_paper)),
            cost_report.reduction_table(options, explained),
        ],
        figure(panels, interval, beyond_paper, paper=bool(claims)),
        f"{CAPTION} {IN_PAPER}" if claims else CAPTION,
    )


def _ranking_table(options: Options, panels: Sequence[PanelComparison], names: Sequence[str]) -> ResultTable:
    """Return a table of the mean cost of each policy at the highest frequency, and of full checkpoints."""
    policies, interval = [Path(name).name for name in names], options.interval
    rows: list[list[Value]] = []
    for panel in panels:
        costs_of = panel.measurement.costs_of
        arms = [strategy(name, FRACTIONS[-1], interval) for name in names]
        arms.append(strategy("round", FRACTIONS[0], interval))  # saves all blocks, whatever the ranking
        costs = {name: costs_of(arm).cost for name, arm in zip([*policies, "full"], arms, strict=True)}
        first, close = cost_report.cheapest(costs)
        means = [mean(finite(values)).value for values in costs.values()]
        rows.append([panel.label, *means, first, ", ".join(close)])
    columns = ["panel", *policies, "full (1x)", "cheapest", "not proved to cost more than the cheapest"]
    title = "Mean cost of each policy at 8x with partial recovery, in iterations"
    return ResultTable(title, cost_report.own_columns(options, columns), rows)


def _claims(panels: Sequence[PanelComparison], interval: int) -> list[Claim]:
    claims = []
    for panel in panels:
        words = f"{panel.label}: mean cost of `priority` at 8x, divided by the mean cost of full checkpoints (1x), {PARTIAL}"
        ratio = _ratio(panel, "priority", interval)
        falls = Claim.of_estimate(f"{panel.panel}-priority-falls", words, "figure 8", (None, 1), ratio)
        claims += [_reduction(panel, interval), falls]
    words = f"share of the panels on which `random` at 8x costs more than full checkpoints (1x), {PARTIAL}"
    share = sum(_ratio(panel, "random", interval).value > 1 for panel in panels) / len(panels)
    return [*claims, Claim("random-rises", words, "figure 8: nearly always", (0.5, 1), share)]


def _reduction(panel: PanelComparison, interval: int) -> Claim:
    row = panel.row(strategy("priority", FRACTIONS[-1], interval))
    words = f"{panel.label}: reduction by `priority` at 8x with partial recovery"
    ends = row["reduction_low"], row["reduction_high"]
    return Claim(f"{panel.panel}-priority", words, "section 5.4", PAPER, row["reduction"], ends)


def _ratio(panel: PanelComparison, ranking: str, interval: int) -> ConfidenceInterval:
    """Return the mean cost of a failure with frequent partial saves, divided by the mean cost with rare full saves.

    Both write the same number of values; `ranking` chooses the blocks of a partial save."""
    costs_of = panel.measurement.costs_of
    often, seldom = (costs_of(strategy(ranking, f, interval)).cost for f in (FRACTIONS[-1], FRACTIONS[0]))
    value, low, high = reduction(*paired(often, seldom))
    return ConfidenceInterval(1 - value, 1 - high, 1 - low)


def figure(
    panels: Sequence[PanelComparison], interval: int, others: Sequence[str] = BEYOND, *, paper: bool
) -> "Figure":
    """Plot the mean cost of a failure against the frequency of checkpoints; `paper` adds the SCAR paper's ranges.

    `interval` is the number of iterations between full checkpoints. The policies `others` are drawn at the highest
    frequency only."""

    def draw(axes: "Axes", panel: PanelComparison) -> None:
        for name, shift in zip(RANKINGS, (-0.1, 0, 0.1), strict=True):
            rows = [panel.row(strategy(name, fraction, interval)) for fraction in FRACTIONS]
            cost_report.draw_means(axes, rows, over="frequency", name=name, shift=shift)
        by_fraction = [strategy("priority", fraction, interval) for fraction in FRACTIONS]
        cost_report.draw_late_failures(axes, panel, by_fraction, shift=-0.1)
        for name in others:
            cost = panel.row(strategy(name, FRACTIONS[-1], interval))["cost_mean"]
            place = [len(FRACTIONS) - 0.75]
            axes.plot(
                place, [cost], marker=MARKERS.get(name, "^"), linestyle="", color=colour_of(name), label=Path(name).name
            )
        level = panel.row(traditional(interval))["cost_mean"]
        axes.axhline(level, color=colour_of("full recovery"), linestyle="--", label="full checkpoint and recovery")
        if paper:
            cost_report.draw_paper_range(axes, len(FRACTIONS) - 1, *(level * (1 - end) for end in reversed(PAPER)))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))  # a cost may be negative

    return cost_report.panel_grid(panels, draw, across="frequency of checkpoints")


EXPERIMENT = Experiment(
    name="priority-checkpoint",
    title="iteration costs when partial checkpoints hold what moved most, the longest unsaved, or a random choice",
    source="SCAR, figures 8 and C.2",
    has_panels=True,
    accepts_workload=True,
    accepts_policy=True,
    run=run,
)
