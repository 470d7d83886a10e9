"""`hf.lab.compare`: measure what failures of the user's own model cost under several strategies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.blocks.own_policy import own_rankings
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
    """The cost of a failure under one strategy. Costs are in iterations, and intervals are 95 % confidence intervals."""

    recovery: str
    """The blocks that return to their saved values after a failure: `full` (all blocks) or `partial` (the lost blocks)."""
    policy: str
    """The policy, which chooses the blocks of each save. The policy `full` saves all blocks at once."""
    fraction: str
    """The part of the state that one save contains, such as `1/4`."""
    lost: str
    """The part of the blocks that a failure takes, such as `1/2`."""
    trials: int
    """The number of trials: simulated runs with one failure each."""
    unconverged: int
    """The number of trials that did not converge. No mean includes these trials."""
    cost_mean: float
    """The mean cost in iterations. The cost of a trial may be a fraction of an iteration."""
    cost_low: float
    """The lower end of the confidence interval of `cost_mean`."""
    cost_high: float
    """The upper end of the confidence interval of `cost_mean`."""
    whole_mean: float
    """The mean cost if each trial counts only whole iterations."""
    reduction: float
    """The fraction of the baseline's cost that this strategy avoids. The baseline is full checkpoints with full recovery.

    For example, 0.7 means that the strategy avoids 70 % of the baseline's cost. The value is NaN if the baseline's cost is 0 in all trials, or if
    no trial converged under both strategies."""
    reduction_low: float
    """The lower end of the confidence interval of `reduction`."""
    reduction_high: float
    """The upper end of the confidence interval of `reduction`."""
    size_mean: float
    """The mean size of the perturbation: the distance between the states after the recovery and before the failure."""
    bound_mean: float
    """The mean upper limit of the cost, which `holdfast.theory.iteration_cost_bound` computes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`. Iterate over it to get the rows; `str(comparison)` returns them as a table of text."""

    rows: list[CostRow]
    """One row for each strategy. The first row is the strategy with full checkpoints and full recovery."""
    remarks: list[str]
    """Sentences about the result, for example how many trials did not converge."""
    report: Path
    """The path of the report page with the table and the figures."""

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
    """Simulate failures of a model, and compare what they cost under several checkpoint and recovery strategies.

    A trial trains the model, loses some of its blocks at a random iteration, and restores blocks from a checkpoint. The
    cost of the failure is the number of additional iterations until the model converges. All strategies save the same
    number of values per iteration on average: the whole state every `interval` iterations, or a part of the state more
    often.

    - `workload`: the model, as an object or as the path of a Python file that defines it.
    - `trials`: the number of failures to simulate for each strategy.
    - `lost`: the fraction of the blocks that a failure takes.
    - `interval`: the number of iterations between two full checkpoints.
    - `seed`: the seed of all random numbers.
    - `jobs`: the number of processes that run trials on this machine.
    - `on`, `address`: `on="ray"` runs the trials on a Ray cluster. `address` is the address of a running cluster.
    - `data`: the folder with the data of the workload.
    - `policies`: Python files with checkpoint policies of your own, which are compared with the built-in policies.
    - `out`: the folder for the report, by default `results/comparison`.
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
            policies=own_rankings(map(str, policies)),
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
    config = {
        "trials": trials,
        "iterations between two full checkpoints": interval,
        "lost": f"{lost} of the blocks",
    }
    return cost_result(NAME, options, config, panels, [], [], [], figure(panels[0], strategies), CAPTION)


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
