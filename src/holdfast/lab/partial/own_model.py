"""`hf.lab.compare`: what failures cost a model of the user's own under several strategies, as a table and a report.

In goes a model, or the path of a file that defines one; out come rows with names and types, and the path of the report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.blocks.policy import Policy
from holdfast.errors import BadInput
from holdfast.extras import require
from holdfast.lab.confidence import finite, mean
from holdfast.lab.experiment import Meter, Options, Progress
from holdfast.lab.partial import cost_figures as grid
from holdfast.lab.partial.comparison import PanelComparison, cost_table, criteria, unconverged_remarks
from holdfast.lab.partial.comparison import compare_strategies as compare_panels
from holdfast.lab.partial.cost_figures import panel_title
from holdfast.lab.plot_style import COLOURS, legend, new_figure, style_name
from holdfast.lab.result import Result, Row
from holdfast.lab.simulate.process_pool import exit_if_worker_process
from holdfast.lab.simulate.strategy import Strategy
from holdfast.workloads.registry import as_workload, load_for_lab
from holdfast.workloads.simple_model import OneState
from holdfast.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "comparison"
SMALLEST = Fraction(1, 8)  # of the state, saved at once


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What a failure costs under one strategy, in iterations: means over trials, with 95 % confidence intervals.

    `reduction` is by how much of itself the cost of full checkpoints and full recovery is reduced. `unconverged` trials did
    not reach the criterion, and are in no mean. A number that there is not is NaN.
    """

    recovery: str
    policy: str
    fraction: str  # of the state, saved at once
    lost: str
    trials: int
    unconverged: int
    cost_mean: float
    cost_low: float
    cost_high: float
    whole_mean: float  # in whole iterations
    reduction: float
    reduction_low: float
    reduction_high: float
    size_mean: float  # of the perturbation
    bound_mean: float  # by Theorem 3.2


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row for each strategy, sentences about them, and the report that was written. Printed, it is a table."""

    rows: list[CostRow]
    remarks: list[str]
    report: Path

    def __iter__(self) -> Iterator[CostRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [("recovery", "policy", "saved", "lost", "cost", "95 %", "reduction"), *map(_line, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


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
    out: str | Path | None = None,
) -> Comparison:
    """Simulate failures of a model, and compare what they cost under full, partial and smaller checkpoints.

    Every trial trains the model, takes the fraction `lost` of its blocks away at a random iteration, recovers, and counts
    how many iterations later it reaches the criterion. All strategies write the same number of values: a full checkpoint
    every `interval` iterations, or a part of one as often. `on="ray"` runs trials on a Ray cluster, at an `address`.
    """
    require("lab", "`hf.lab.compare`")
    if jobs > 1:
        exit_if_worker_process()  # before the work that comes first, which every process would do again
    from holdfast.lab.result_page import write
    from holdfast.lab.simulate.ray_pool import trial_cluster

    model = _workload(workload, None if data is None else Path(data))
    folder = Path(out) if out is not None else Path("results") / NAME
    with trial_cluster(on, address) as cluster:
        options = Options(
            seed=seed, trials=trials, jobs=jobs, out=folder, interval=interval, workload=model, elsewhere=cluster
        )
        result = compared(options, _silent, trials, _fraction(lost))
    result = replace(result, date=date.today().isoformat())
    return Comparison([_typed(row) for row in result.rows], result.remarks, write(result, folder))


def compared(options: Options, meter: Meter, trials: int, lost: Fraction) -> Result:
    """The comparison as a result, without claims."""
    strategies = _strategies(options.interval, lost)
    panels = compare_panels(options, meter, trials, strategies, strategies[0])
    return Result(
        experiment=NAME,
        config={
            "seed": options.seed,
            "trials": trials,
            "interval": options.interval,
            "lost": str(lost),
            **criteria(panels),
        },
        rows=[row for each in panels for row in each.rows],
        claims=[],
        remarks=[*unconverged_remarks(panels), *grid.bound_remarks(panels)],
        tables=[cost_table(panels)],
        figures={NAME: figure(panels[0], strategies), "bound": grid.bound_figure(panels)},
        captions={NAME: CAPTION, "bound": grid.BOUND_CAPTION},
    )


def _strategies(interval: int, lost: Fraction) -> list[Strategy]:
    """Full checkpoints with both recoveries, then smaller ones of each ranking; the first is the baseline."""
    full = Policy(ranking="full", interval=interval)
    part = max(SMALLEST, Fraction(1, interval))
    smaller = [Policy(ranking=name, interval=interval, fraction=part) for name in ("priority", "round", "random")]
    return [
        Strategy(policy=full, recovery="full", lost=lost),
        *(Strategy(policy=each, recovery="partial", lost=lost) for each in (full, *(smaller if part < 1 else ()))),
    ]


CAPTION = (
    "What a failure costs under each strategy, in iterations: means with 95 % confidence intervals. Triangles: failures after "
    "the first full checkpoint alone."
)


def figure(panel: PanelComparison, strategies: Sequence[Strategy]) -> "Figure":
    """Mean costs with their intervals, one line for each strategy."""
    drawn = new_figure(6.4, 0.45 * len(strategies) + 1.5)
    axes = drawn.subplots()
    later = panel.measurement.steps >= strategies[0].policy.interval
    for place, each in enumerate(strategies):
        row, colour = panel.row(each), COLOURS[style_name(each)]
        half = row["cost_high"] - row["cost_mean"]
        axes.errorbar([row["cost_mean"]], [place], xerr=[half], marker="o", capsize=3, color=colour)
        after = mean(finite(panel.measurement.of(each).cost[later])).value
        axes.plot([after], [place], marker="v", markersize=5, linestyle="", color=colour, markerfacecolor="none")
    axes.errorbar([], [], xerr=[], marker="o", capsize=3, color="black", label="all failures")
    axes.plot([], [], "v", color="black", markerfacecolor="none", label="after the first full checkpoint")
    axes.set_yticks(range(len(strategies)), [style_name(each) for each in strategies])
    axes.invert_yaxis()
    axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    axes.set_xlabel("iteration cost")
    axes.set_title(panel_title(panel), fontsize=9)
    legend(drawn, [axes])
    return drawn


def _workload(given: OneState | Workload | str | Path, data: Path | None) -> Workload:
    return load_for_lab(str(given), data) if isinstance(given, str | Path) else as_workload(given, "the workload")


def _fraction(lost: float | Fraction) -> Fraction:
    found = Fraction(lost).limit_denominator(1000)
    if not 0 < found <= 1:
        raise BadInput(f"a failure takes a fraction in (0, 1] of the blocks, not {lost}")
    return found


def _typed(row: Row) -> CostRow:
    return CostRow(**{each.name: row[each.name] for each in fields(CostRow)})


def _line(row: CostRow) -> tuple[str, ...]:
    low, high = f"{row.cost_low:.2f}", f"{row.cost_high:.2f}"
    return (
        row.recovery,
        row.policy,
        row.fraction,
        row.lost,
        f"{row.cost_mean:.2f}",
        f"{low} to {high}",
        f"{row.reduction:.0%}" if row.reduction == row.reduction else "",
    )


def _silent(what: str, total: int) -> Progress:
    return lambda done: None
