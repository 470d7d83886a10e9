"""`hf.lab.compare`: measure what failures of the user's own model cost under several strategies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.blocks.own_policy import own_ranking
from holdfast.blocks.policy import Policy
from holdfast.errors import BadInput
from holdfast.extras import require
from holdfast.lab.confidence import ends_text, finite, mean
from holdfast.lab.experiment import Meter, Options, with_reuse
from holdfast.lab.partial.comparison import PanelComparison, compare_strategies
from holdfast.lab.partial.cost_report import cost_result, panel_title
from holdfast.lab.plot_style import colour_of, legend, new_figure, style_name
from holdfast.lab.result import Result
from holdfast.lab.simulate.pools import exit_if_worker_process
from holdfast.lab.simulate.strategy import Strategy
from holdfast.workloads.registry import as_workload, load_for_lab
from holdfast.workloads.simple_model import OneState
from holdfast.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "comparison"
SMALLEST = Fraction(1, 8)  # the smallest part of the state that one save holds
CAPTION = (
    "The cost of a failure under each strategy, in iterations: means with 95 % confidence intervals. Triangles: only "
    "failures after the first full checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """The cost of a failure under one strategy, in iterations, with 95 % confidence intervals."""

    recovery: str
    """The blocks that return to their saved values: `full` for all of them, `partial` for the lost ones only."""
    policy: str
    """The policy that chooses which blocks are saved first; `full` saves all of them at once."""
    fraction: str
    """The part of the state that one save holds."""
    lost: str
    """The part of the state that a failure loses."""
    trials: int
    """The number of failures, each in a run of its own."""
    unconverged: int
    """The trials that did not reach the criterion; they are in no mean."""
    cost_mean: float
    """The mean cost in iterations, which may be fractions."""
    cost_low: float
    """The lower end of the interval of `cost_mean`."""
    cost_high: float
    """The upper end of the interval of `cost_mean`."""
    whole_mean: float
    """The mean cost if iterations are counted in whole numbers."""
    reduction: float
    """The fraction by which the cost is below that of full checkpoints with full recovery; NaN if unknown."""
    reduction_low: float
    """The lower end of the interval of `reduction`."""
    reduction_high: float
    """The upper end of the interval of `reduction`."""
    size_mean: float
    """The mean distance between the recovered state and the lost state."""
    bound_mean: float
    """The mean upper limit of the cost by Theorem 3.2."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`: a row for each strategy, remarks, and the path of the report. `str()` gives a table."""

    rows: list[CostRow]
    """The cost of each strategy, beginning with full checkpoints and full recovery. Iteration goes over them."""
    remarks: list[str]
    """Sentences on the result, such as how many trials did not converge."""
    report: Path
    """The page with the table and the figures."""

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [("recovery", "policy", "saved", "lost", "cost", "95 %", "reduction")]
        for row in self.rows:
            mean, interval = f"{row.cost_mean:.2f}", ends_text(row.cost_low, row.cost_high)
            reduction = f"{row.reduction:.0%}" if row.reduction == row.reduction else ""
            lines.append((row.recovery, row.policy, row.fraction, row.lost, mean, interval, reduction))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = [[word.ljust(width) for word, width in zip(line, widths, strict=True)] for line in lines]
        return "\n".join("  ".join(line).rstrip() for line in padded)


def compare(
    workload: OneState | Workload | str | Path,
    *,
    trials: int = 40,
    lost: float | Fraction = Fraction(1, 2),
    interval: int = 8,
    seed: int = 0,
    jobs: int = 1,
    on: str | None = None,
    address: str | None = None,
    data: str | Path | None = None,
    policies: Sequence[str | Path] = (),
    out: str | Path | None = None,
) -> Comparison:
    """Simulate failures of a model, and compare their costs under full and partial checkpoints and recoveries.

    Every trial trains the model, loses the fraction `lost` of its blocks at a random iteration, recovers, and counts
    the additional iterations until it converges. All strategies write the same number of values: the whole state
    every `interval` iterations, or a part of it more often. `on="ray"` runs trials on a Ray cluster, at `address` if
    given. `policies` are Python files with checkpoint policies of your own, which are compared with the built-in ones.
    The report is written to `out`, by default the folder `results/comparison`.
    """
    require("lab", "`hf.lab.compare`")
    if jobs > 1:
        exit_if_worker_process()  # before any work, which every process would repeat
    from holdfast.lab.result_page import write
    from holdfast.lab.simulate.pools import trial_cluster

    model = load_model(workload, data)
    folder = Path(out) if out is not None else Path("results") / NAME
    fraction = Fraction(lost).limit_denominator(1000)
    if not 0 < fraction <= 1:
        raise BadInput(f"lost must be a fraction of the blocks in (0, 1] (got {lost}).")
    with trial_cluster(on, address) as cluster:
        options = Options(
            seed=seed,
            trials=trials,
            jobs=jobs,
            out=folder,
            interval=interval,
            workload=model,
            cluster=cluster,
            policies=tuple(own_ranking(str(path)) for path in policies),
        )
        result = comparison_result(options, lambda label, total: lambda done: None, trials, fraction)
    result = replace(with_reuse(result, options), date=date.today().isoformat())
    rows = [CostRow(**{field.name: row[field.name] for field in fields(CostRow)}) for row in result.rows]
    return Comparison(rows, result.remarks, write(result, folder))


def load_model(workload: OneState | Workload | str | Path, data: str | Path | None) -> Workload:
    """Return `workload` as a Workload; if it is a path, load it from that file, with its data in the folder `data`."""
    if isinstance(workload, str | Path):
        return load_for_lab(str(workload), None if data is None else Path(data))
    return as_workload(workload, "the workload")


def comparison_result(options: Options, meter: Meter, trials: int, lost: Fraction) -> Result:
    """Compare checkpoint and recovery strategies on the user's model; failures lose the fraction `lost` of its blocks."""
    interval = options.interval
    full, part = Policy(ranking="full", interval=interval), max(SMALLEST, Fraction(1, interval))
    rankings = ("priority", "round", "random", *options.policies) if part < 1 else ()
    smaller = [Policy(ranking=name, interval=interval, fraction=part) for name in rankings]
    strategies = [
        Strategy(policy=full, recovery="full", lost=lost),
        *(Strategy(policy=policy, recovery="partial", lost=lost) for policy in (full, *smaller)),
    ]
    panels = compare_strategies(options, meter, trials, strategies, strategies[0])
    config = {"trials": trials, "interval": interval, "lost": str(lost)}
    return cost_result(NAME, options, config, panels, [], [], figure(panels[0], strategies), CAPTION)


def figure(panel: PanelComparison, strategies: Sequence[Strategy]) -> "Figure":
    drawn = new_figure(6.4, 0.45 * len(strategies) + 1.5)
    axes = drawn.subplots()
    later = panel.measurement.steps >= strategies[0].policy.interval
    for place, strategy in enumerate(strategies):
        row, colour = panel.row(strategy), colour_of(style_name(strategy))
        half = row["cost_high"] - row["cost_mean"]
        axes.errorbar([row["cost_mean"]], [place], xerr=[half], marker="o", capsize=3, color=colour)
        late_mean = mean(finite(panel.measurement.costs_of(strategy).cost[later])).value
        axes.plot([late_mean], [place], marker="v", markersize=5, linestyle="", color=colour, markerfacecolor="none")
    axes.errorbar([], [], xerr=[], marker="o", capsize=3, color="black", label="all failures")
    axes.plot([], [], "v", color="black", markerfacecolor="none", label="after the first full checkpoint")
    axes.set_yticks(range(len(strategies)), [style_name(strategy) for strategy in strategies])
    axes.invert_yaxis()
    axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    axes.set_xlabel("iteration cost")
    axes.set_title(panel_title(panel), fontsize=9)
    legend(drawn, [axes])
    return drawn
