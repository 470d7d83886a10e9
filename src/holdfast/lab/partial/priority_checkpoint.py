"""Figures 8 and C.2: which blocks to save when a save may hold only some of them, at the same bytes per iteration."""

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from holdfast.blocks.policy import Policy
from holdfast.lab.confidence import ConfidenceInterval, paired, reduction
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
from holdfast.lab.plot_style import COLOURS, MARKERS
from holdfast.lab.result import Claim, Result
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOST = Fraction(1, 2)
FRACTIONS = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
RANKINGS = ("priority", "round", "random")
BEYOND = ("relative", "threshold")  # not in the paper, compared with the others at the smallest fraction
PAPER = (0.78, 0.95)


def strategy(ranking: str, fraction: Fraction, interval: int) -> Strategy:
    """Partial checkpoints of a ranking, and partial recovery of the lost half."""
    policy = Policy(ranking=ranking, interval=interval, fraction=fraction)
    return Strategy(policy=policy, recovery="partial", lost=LOST)


def traditional(interval: int) -> Strategy:
    """Full checkpoints and full recovery."""
    return Strategy(policy=Policy(ranking="full", interval=interval), recovery="full", lost=LOST)


def run(options: Options, meter: Meter) -> Result:
    """Compare rankings at rising frequencies on every panel, or without claims on a workload of the user's own."""
    trials = options.count(full=100, quick=8)
    baseline = traditional(options.interval)
    smaller = [strategy(name, fraction, options.interval) for name in RANKINGS for fraction in FRACTIONS]
    beyond = [strategy(name, FRACTIONS[-1], options.interval) for name in BEYOND]
    panels, own = (
        compare_strategies(options, meter, trials, [baseline, *smaller, *beyond], baseline),
        options.workload is not None,
    )
    return Result(
        experiment="priority-checkpoint",
        config={
            "seed": options.seed,
            "trials": trials,
            "interval": options.interval,
            "lost": str(LOST),
            **criteria(panels),
        },
        rows=[row for compared in panels for row in compared.rows],
        claims=[]
        if own
        else [
            *(claim for p in panels for claim in _claims(p, options.interval)),
            _random_rises(panels, options.interval),
        ],
        remarks=[
            *([] if options.quick or own else panel_notes(options.panels)),
            *(_cause(p, options.interval, claimed=not own) for p in panels),
            *(_beyond(p, options.interval) for p in panels),
            *unconverged_remarks(panels),
            *prediction.bound_remarks(panels),
        ],
        tables=[cost_table(panels)],
        figures={
            "priority-checkpoint": figure(panels, options.interval, paper=not own),
            "bound": prediction.bound_figure(panels),
        },
        captions={
            "priority-checkpoint": CAPTION if own else f"{CAPTION} {IN_PAPER}",
            "bound": prediction.BOUND_CAPTION,
        },
    )


def _cause(compared: PanelComparison, interval: int, *, claimed: bool) -> str:
    most = strategy("priority", FRACTIONS[-1], interval)
    return explain_reduction(compared, most, traditional(interval), _saved(compared, interval) if claimed else None)


def _saved(compared: PanelComparison, interval: int) -> Claim:
    row = compared.row(strategy("priority", FRACTIONS[-1], interval))
    return Claim(
        id=f"{compared.panel}-priority",
        claim=f"{compared.label}: reduction of the cost by priority 1/8 checkpoints at 8x, 1/2 lost, against full recovery",
        source="section 5.4",
        expected=PAPER,
        measured=row["reduction"],
        interval=(row["reduction_low"], row["reduction_high"]),
    )


def _claims(compared: PanelComparison, interval: int) -> list[Claim]:
    ratio = _ratio(compared, "priority", interval)
    falls = Claim(
        id=f"{compared.panel}-priority-falls",
        claim=f"{compared.label}: mean cost of priority at 8x, as a fraction of that at 1x",
        source="figure 8",
        expected=(None, 1),
        measured=ratio.value,
        interval=(ratio.low, ratio.high),
    )
    return [_saved(compared, interval), falls]


def _ratio(compared: PanelComparison, ranking: str, interval: int) -> ConfidenceInterval:
    """The mean cost at the highest frequency over that of full checkpoints."""
    of = compared.measurement.of
    often, seldom = (of(strategy(ranking, f, interval)).cost for f in (FRACTIONS[-1], FRACTIONS[0]))
    value, low, high = reduction(*paired(often, seldom))
    return ConfidenceInterval(1 - value, 1 - high, 1 - low)


def _random_rises(panels: Sequence[PanelComparison], interval: int) -> Claim:
    return Claim(
        id="random-rises",
        claim="share of panels in which the mean cost of random at 8x is above that at 1x",
        source="figure 8: nearly always",
        expected=(0.5, 1),
        measured=sum(_ratio(compared, "random", interval).value > 1 for compared in panels) / len(panels),
    )


def _beyond(compared: PanelComparison, interval: int) -> str:
    """How the policies that are not in the paper fare."""
    costs = {name: compared.row(strategy(name, FRACTIONS[-1], interval))["cost_mean"] for name in (*RANKINGS, *BEYOND)}
    order = ", ".join(f"{name} {cost:.2f}" for name, cost in sorted(costs.items(), key=lambda item: item[1]))
    return f"{compared.label}: mean cost at 1/8 and 8x, cheapest first: {order}."


CAPTION = (
    "What a failure that takes half of the parameters costs, in iterations, over how often checkpoints are saved, all at the "
    "same bytes per iteration: means with 95 % confidence intervals. Dotted, late failures: those after the first "
    "full checkpoint alone. Dashed: full checkpoints and full recovery."
)
IN_PAPER = "Yellow: where the paper's reductions would put priority at the highest frequency."


def figure(panels: Sequence[PanelComparison], interval: int, *, paper: bool) -> "Figure":
    """Mean costs with 95 % confidence intervals over the frequency; dashed: traditional checkpoint and recovery."""

    def draw(axes: "Axes", compared: PanelComparison) -> None:
        for name, shift in zip(RANKINGS, (-0.1, 0, 0.1), strict=True):
            rows = [compared.row(strategy(name, fraction, interval)) for fraction in FRACTIONS]
            draw_means(axes, rows, over="frequency", name=name, shift=shift)
        draw_late_failures(
            axes, compared, [strategy("priority", fraction, interval) for fraction in FRACTIONS], shift=-0.1
        )
        for name in BEYOND:
            row = compared.row(strategy(name, FRACTIONS[-1], interval))
            place = [len(FRACTIONS) - 0.75]
            axes.plot(place, [row["cost_mean"]], marker=MARKERS[name], linestyle="", color=COLOURS[name], label=name)
        level = compared.row(traditional(interval))["cost_mean"]
        axes.axhline(level, color=COLOURS["full recovery"], linestyle="--", label="full checkpoint and recovery")
        if paper:
            draw_paper_range(axes, len(FRACTIONS) - 1, *(level * (1 - end) for end in reversed(PAPER)))
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))  # a failure may cost less than nothing

    return panel_grid(panels, draw, across="frequency of checkpoints")


EXPERIMENT = Experiment(
    name="priority-checkpoint",
    title="iteration costs when partial checkpoints hold what moved most, the longest unsaved, or a random choice",
    source="SCAR, figures 8 and C.2",
    panels=True,
    own=True,
    run=run,
)
