"""Reports on compared strategies: the cost table, figures like the SCAR paper's, and why claims fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab import confidence
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.experiment import Options
from holdfast.lab.partial.comparison import LIMIT, PanelComparison
from holdfast.lab.partial.panels import panel_notes, quick_notes
from holdfast.lab.plot_style import BAND, colour_of, legend, new_figure, style_name
from holdfast.lab.result import Claim, Result, ResultTable, Row, Value
from holdfast.lab.simulate.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 3.4, 2.9  # inches of one panel
COLUMNS = {  # of the cost table, from a row of a result
    "workload": "panel",
    "recovery": "recovery",
    "policy": "policy",
    "saved at once": "fraction",
    "lost": "lost",
    "trials": "trials",
    "not converged": "unconverged",
    "cost": "cost_mean",
    "from": "cost_low",
    "to": "cost_high",
    "whole iterations": "whole_mean",
    "reduction": "reduction",
    "reduction from": "reduction_low",
    "reduction to": "reduction_high",
    "bound": "bound_mean",
}
BOUND_CAPTION = (
    "Each point is a trial: one run with a failure. The horizontal axis has the bound of Theorem 3.2, the vertical axis the "
    "measured cost. Trials below the line (cost = bound) cost less than the bound. Trials that did not converge are not shown."
)
REDUCTIONS = "Reductions, and why claims do not hold"
REDUCTION_COLUMNS = [
    "panel",
    "blocks lost",
    "reduction, in whole iterations",
    "early failures",
    "reduction without early failures",
]
REDUCTION_COLUMNS += ["from", "to", "perturbation smaller by, %", "why the claim does not hold or is not resolved"]
OWN_REDUCTIONS = "Reductions by partial recovery"  # of the user's own model, about which there are no claims
REDUCTION_REMARK = (
    'In the table "{title}" below, the column "reduction, in whole iterations" counts whole iterations, as the SCAR paper '
    'does. The column "reduction without early failures" also counts fractions of an iteration; "from" and "to" are the ends '
    'of its 95 % interval. The column "perturbation smaller by, %" says how much smaller the perturbation is than under full '
    "recovery, in late failures only."
)
IN_RANGE = "the value is in the expected range, but not its whole 95 % interval."
WHY_NOTHING = "why there is no reduction"
BOUNDS = "Measured costs and the bound of Theorem 3.2"
BOUND_COLUMNS = [
    "panel",
    "c",
    "trials",
    "trials that cost at most the bound, %",
    "median cost / bound",
    "largest cost / bound",
]
BOUND_COLUMNS += ["trials that cost at most the bound, both in whole iterations, %", "how c was found"]


def cost_result(
    name: str,
    options: Options,
    config: Mapping[str, Any],
    panels: Sequence[PanelComparison],
    claims: list[Claim],
    remarks: Sequence[str],
    tables: Sequence[ResultTable],
    figure: "Figure",
    caption: str,
) -> Result:
    """Return the result of a comparison: a table of costs, `figure`, and a figure of the costs and their upper bounds."""
    rows = [row for comparison in panels for row in comparison.rows]
    values = [[row[key] for key in COLUMNS.values()] for row in rows]
    cells = [[None if v != v else round(v, 4) if isinstance(v, float) else v for v in line] for line in values]
    return Result(
        experiment=name,
        config={"seed": options.seed, **config, **criteria(panels)},
        rows=rows,
        claims=claims,
        remarks=[
            *departures(options),
            *remarks,
            *unconverged_remarks(panels),
        ],
        tables=[
            *tables,
            ResultTable(BOUNDS, own_columns(options, BOUND_COLUMNS), [_bound_row(comparison) for comparison in panels]),
            ResultTable("Costs in iterations, with 95 % confidence intervals (from, to)", list(COLUMNS), cells),
        ],
        figures={name: figure, "bound": bound_figure(panels)},
        captions={name: caption, "bound": BOUND_CAPTION},
    )


def reduction_table(options: Options, rows: Sequence[Sequence[Value]]) -> ResultTable:
    """Return a table of rows that `reduction_row` made; for the user's own model without the column on claims."""
    if options.workload is None:
        return ResultTable(REDUCTIONS, REDUCTION_COLUMNS, [list(row) for row in rows])
    why = [WHY_NOTHING] if any(row[-1] for row in rows) else []
    columns = own_columns(options, REDUCTION_COLUMNS[:-1]) + why
    return ResultTable(OWN_REDUCTIONS, columns, [list(row[: len(columns)]) for row in rows])


def reduction_remark(options: Options) -> str:
    return REDUCTION_REMARK.format(title=REDUCTIONS if options.workload is None else OWN_REDUCTIONS)


def own_columns(options: Options, columns: Sequence[str]) -> list[str]:
    """Return `columns`, in which the user's own model is not called a panel."""
    return [*columns] if options.workload is None else ["workload" if name == "panel" else name for name in columns]


def departures(options: Options) -> list[str]:
    """Return notes on how the models and data differ from the SCAR paper's; there are none for the user's own model."""
    if options.workload is not None:
        return []
    return quick_notes(options.panels) if options.quick else panel_notes(options.panels)


def criteria(panels: Sequence[PanelComparison]) -> Row:
    """Return a text for each panel (model and data set): the loss to reach, and the iterations that this takes."""
    described = {}
    for panel in panels:
        shortest, longest = panel.measurement.lengths.min(), panel.measurement.lengths.max()
        lengths = f"{shortest} to {longest} ({panel.measurement.unperturbed:.1f} on average)"
        words = f"{shortest}" if shortest == longest else lengths
        described[panel.panel] = (
            f"converged at a loss of {panel.criterion:g}, after {words} iterations without a failure"
        )
    return described


def cheapest(costs: Mapping[str, Floats]) -> tuple[str, list[str]]:
    """Return the name with the lowest mean cost, and the names that are not proved to cost more than this one.

    Each entry has the costs of the same failures under one strategy, so the pairs of a trial are compared."""
    means = {name: confidence.mean(confidence.finite(values)).value for name, values in costs.items()}
    names = sorted(costs, key=lambda name: (isnan(means[name]), means[name]))
    return names[0], [name for name in names[1:] if not _costs_more(costs[name], costs[names[0]])]


def _costs_more(costs: Floats, others: Floats) -> bool:
    """Return True if the mean of `costs` is above that of `others`, with the whole 95 % interval of the difference."""
    ours, theirs = confidence.paired(costs, others)
    return confidence.mean(ours - theirs).low > 0


def unconverged_remarks(panels: Sequence[PanelComparison]) -> list[str]:
    return [
        f"{comparison.label}, policy {row['policy']} with {row['fraction']} of the state in a save, {row['recovery']} recovery, "
        f"{row['lost']} of the blocks lost: {row['unconverged']} of {row['trials']} trials did not converge within {LIMIT} "
        "times the iterations of a run without a failure. "
        + (
            "No mean or reduction is given."
            if isnan(row["cost_mean"])
            else "Means and reductions leave these trials out."
        )
        for comparison in panels
        for row in comparison.rows
        if row["unconverged"]
    ]


def panel_grid(
    panels: Sequence[PanelComparison], draw: Callable[["Axes", PanelComparison], None], *, across: str
) -> "Figure":
    """Return a figure with up to four plots in a row, one drawn by `draw` for each panel; `across` labels the x-axes."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(WIDTH * max(columns, 1.4), HEIGHT * rows + 0.5)
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, comparison in zip(places, panels, strict=False):
        draw(axes, comparison)
        axes.set_title(panel_title(comparison), fontsize=9)
        axes.set_xlabel(across)
        axes.set_ylabel("iteration cost")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    legend(figure, list(places[: len(panels)]))
    return figure


def panel_title(comparison: PanelComparison) -> str:
    quick = "quick, " if comparison.quick else ""
    return f"{comparison.title or comparison.label} ({quick}{comparison.measurement.unperturbed:.0f} iterations)"


def draw_means(axes: "Axes", rows: Sequence[Row], *, over: str, name: str, shift: float = 0) -> None:
    """Plot the mean costs in `rows` as series `name`, moved right by `shift`; the column `over` labels the ticks."""
    places = [place + shift for place in range(len(rows))]
    means = [row["cost_mean"] for row in rows]
    half = [row["cost_high"] - row["cost_mean"] for row in rows]
    axes.errorbar(places, means, yerr=half, marker="o", markersize=4, capsize=3, label=name, color=colour_of(name))
    axes.set_xticks(range(len(rows)), [str(row[over]) for row in rows])


def draw_late_failures(
    axes: "Axes", comparison: PanelComparison, strategies: Sequence[Strategy], *, shift: float = 0
) -> None:
    """Plot each strategy's mean cost of failures after the first full checkpoint; `shift` moves points to the right."""
    measured, later = comparison.measurement, comparison.measurement.steps >= strategies[0].policy.interval
    if not later.any():
        return
    name = style_name(strategies[-1])
    costs = [confidence.finite(measured.costs_of(strategy).cost[later]) for strategy in strategies]
    means = [confidence.mean(values).value for values in costs]
    places = np.arange(len(means)) + shift
    axes.plot(places, means, "v:", markersize=3, color=colour_of(name), label=f"{name}, late failures")


def draw_paper_range(axes: "Axes", place: float, low: float, high: float) -> None:
    """Shade the range of costs that the SCAR paper reports, from `low` to `high`, around x = `place`."""
    if np.isfinite(low) and np.isfinite(high):
        ends, label = [place - 0.3, place + 0.3], "range in the paper"
        axes.fill_between(ends, low, high, color=BAND, alpha=0.5, linewidth=0, zorder=0, label=label)


def _bound_row(comparison: PanelComparison) -> list[Value]:
    """Return a row of the table that compares measured costs with the bound of Theorem 3.2 of the SCAR paper."""
    costs = list(comparison.measurement.strategies.values())
    cost, whole, bound = (np.concatenate([getattr(c, name) for c in costs]) for name in ("cost", "whole", "bound"))
    rate = comparison.measurement.rate
    if np.isnan(bound).any():
        why = "there is no bound, because the distance to the optimum does not shrink"
        return [comparison.label, rate.c, len(cost), None, None, None, None, why]
    closeness = cost / np.maximum(bound, 1e-9)
    within, rounded = 100 * float(np.mean(cost <= bound)), 100 * float(np.mean(whole <= np.ceil(bound)))
    ratios = float(np.median(closeness)), float(np.max(closeness))
    return [comparison.label, rate.c, len(cost), within, *ratios, rounded, rate.words]


def bound_figure(panels: Sequence[PanelComparison]) -> "Figure":
    """Plot each trial's measured cost (y) against its upper bound by Theorem 3.2 of the SCAR paper (x)."""

    def draw(axes: "Axes", comparison: PanelComparison) -> None:
        strategies = comparison.measurement.strategies
        for name in dict.fromkeys(map(style_name, strategies)):
            costs = [c for strategy, c in strategies.items() if style_name(strategy) == name]
            bound, cost = np.concatenate([c.bound for c in costs]), np.concatenate([c.cost for c in costs])
            axes.scatter(bound, cost, s=6, alpha=0.5, linewidths=0, color=colour_of(name), rasterized=True)
            axes.scatter([], [], s=24, color=colour_of(name), label=name)  # for the legend, large enough to see
        end = max(float(np.nanmax(c.bound, initial=1)) for c in strategies.values())
        axes.plot([0, end], [0, end], color="black", linewidth=0.8, label="cost = bound")

    return panel_grid(panels, draw, across="bound of Theorem 3.2")


@dataclass(frozen=True, slots=True)
class ReductionFacts:
    """Measurements that may explain why one strategy has lower costs of failures than another."""

    trials: int
    whole: float  # reduction of the cost in whole iterations, as the paper counts
    early: int  # failures before the first full checkpoint
    later: ConfidenceInterval  # reduction of the cost in the other trials
    smaller: float  # reduction of the perturbation's norm in the other trials
    scaled: float | None  # `later` with a ranking by relative distance
    concentration: float  # share of the movement that is in the blocks of one save
    largest: float  # size of the largest block, as a fraction of all values
    budget: float  # size of a save, as a fraction of all values


def reduction_facts(panel: PanelComparison, strategy: Strategy, baseline: Strategy) -> ReductionFacts:
    """Return measurements that may explain why failures cost more or less under `strategy` than under `baseline`."""
    measured = panel.measurement
    ours, full = measured.costs_of(strategy), measured.costs_of(baseline)
    both = np.isfinite(ours.cost) & np.isfinite(full.cost)
    early = measured.steps < baseline.policy.interval
    later = both & ~early if (both & ~early).any() else both
    scaled, relative = None, replace(strategy, policy=replace(strategy.policy, ranking="relative"))
    if relative in measured.strategies:
        costs = confidence.paired(measured.costs_of(relative).cost[later], full.cost[later])
        scaled = confidence.reduction(*costs).value
    return ReductionFacts(
        trials=len(later),
        whole=confidence.reduction(ours.whole[both], full.whole[both]).value,
        early=int(early.sum()),
        later=confidence.reduction(ours.cost[later], full.cost[later]),
        smaller=confidence.reduction(ours.size[later], full.size[later]).value,
        scaled=scaled,
        concentration=measured.concentration,
        largest=panel.largest_block,
        budget=float(strategy.policy.fraction),
    )


def reduction_row(
    panel: PanelComparison, strategy: Strategy, baseline: Strategy, claim: Claim | None = None
) -> list[Value]:
    """Return a row that compares the costs of `strategy` and `baseline`, with the reason if `claim` does not hold."""
    facts = reduction_facts(panel, strategy, baseline)
    place: list[Value] = [panel.label, str(strategy.lost)]
    early = f"{facts.early} of {facts.trials}"
    if isnan(facts.later.value):
        return [
            *place,
            None,
            early,
            None,
            None,
            None,
            None,
            "full recovery cost nothing, so there is nothing to reduce",
        ]
    return [*place, facts.whole, early, *facts.later, 100 * facts.smaller, why(facts, claim)]


def why(facts: ReductionFacts, claim: Claim | None) -> str:
    """Return why `claim` does not hold or is not resolved; empty if it holds or there is none."""
    if claim is None or (claim.holds and claim.resolved):
        return ""
    if claim.holds:
        return f"not resolved: {IN_RANGE}"
    return f"{'does not hold' if claim.resolved else 'not resolved, by chance or because'}: {cause_of(facts, claim)}"


def cause_of(facts: ReductionFacts, claim: Claim) -> str:
    """Return a clause that says why the measured reduction is outside the range that `claim` expects."""
    low, high = claim.expected
    inside = f"in the expected range ({low} to {high})"
    if facts.early == facts.trials:
        return "every failure is early, so full recovery starts over."
    if claim.expects(facts.later.value):
        return f"after early failures, blocks return to their initial values. Without early failures, the reduction is {inside}."
    if claim.expects(facts.whole):
        return f"costs are counted in fractions of an iteration. In whole iterations, the reduction is {inside}."
    if high is not None and claim.measured > high:
        unit = (1 - facts.later.value) / (1 - facts.smaller)
        return (
            "the reduction is larger than expected, because the surviving blocks help the restored blocks to recover. For "
            f"perturbations of equal size, partial recovery costs {unit:.0%} of what full recovery costs."
        )
    if facts.largest > facts.budget:
        return (
            f"one block has {facts.largest:.0%} of all values, and a save has room for {facts.budget:.1%} of them. This block "
            "is therefore saved no more often than with full checkpoints."
        )
    if facts.scaled is not None and claim.expects(facts.scaled):
        return (
            "changes of large and small blocks are ranked alike. If changes are ranked relative to the sizes of the blocks, "
            f"and early failures are left out, the reduction is {facts.scaled:.2f}, which is {inside}."
        )
    if facts.budget < 1 and low is not None and facts.smaller < low:
        return (
            f"the changes are spread over many blocks. The {facts.budget:.1%} of the state that changed most has only "
            f"{facts.concentration:.0%} of the squared change between two full checkpoints, so a save leaves out the rest."
        )
    return "not found. The perturbation is as small as expected, and the cost is not."
