"""Strategies compared on panels: every panel measured in turn, as rows of a table and as single trials.

In go options and strategies; out comes, for each panel, its measurement and a row for each strategy. Beside the result
`trials.csv` has every single trial.

The costs of strategies as a table for a reader, and what is to be said of trials that did not converge.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from pathlib import Path

from holdfast.errors import StorageFailed
from holdfast.lab import confidence as interval
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.measure import LIMIT, Costs, Measurement, measure
from holdfast.lab.partial.panels import Panel, chosen_panels
from holdfast.lab.result import ResultTable, Row
from holdfast.lab.simulate.strategy import Strategy, lost_in_trial
from holdfast.report.files import prepare, replace_text
from holdfast.workloads.workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class PanelComparison:
    """What one panel showed: its measurement, and a row for each strategy."""

    panel: str
    workload: str
    quick: bool
    criterion: float
    largest: float  # the largest block's share of all values
    measurement: Measurement
    rows: list[Row]
    title: str = ""  # for figures, in words
    blocks: int = 0

    @property
    def label(self) -> str:
        """The panel for a reader, who must not take a quick run for the real one."""
        return f"{self.panel}, quick on {self.workload}" if self.quick else self.panel

    def row(self, strategy: Strategy) -> Row:
        """The row of a strategy."""
        return next(row for row in self.rows if row.items() >= _named(strategy).items())


def compare_strategies(
    options: Options, meter: Meter, trials: int, strategies: Sequence[Strategy], baseline: Strategy, *, early: int = 1
) -> list[PanelComparison]:
    """Measure strategies on the chosen panels, or on the user's own workload; reductions are against the baseline.

    Every second failure strikes before step `early`, if that is more than 1.
    """
    folder, trials_done = prepare(options.out), trials_folder(options)
    found = []
    for name, alike in groupby(_loaded(options), key=lambda loaded: loaded[1].name):
        panels, workloads = zip(*alike, strict=True)
        journal, title = trials_done / f"{_file_name(name)}.jsonl", " and ".join(panel.name for panel in panels)
        measured = measure(title, workloads, [baseline, *strategies], options, trials, journal, meter, early)
        for panel, workload, each in zip(panels, workloads, measured, strict=True):
            rows = [_row(panel.name, each, strategy, baseline) for strategy in strategies]
            found.append(_compared(panel, workload, each, rows, quick=options.quick and options.workload is None))
    replace_text(folder / "trials.csv", _csv(found, strategies))
    return found


def _loaded(options: Options) -> Iterator[tuple[Panel, Workload]]:
    """The chosen panels with their workloads; those that train alike, and differ in their blocks alone, are neighbours."""
    if options.workload is not None:
        yield _own(options.workload), options.workload
        return
    for panel in chosen_panels(options.panels):
        yield panel, panel.workload(options.data, quick=options.quick)


def _own(workload: Workload) -> Panel:
    """A panel of a workload that is none of the paper's."""
    return Panel(workload.name, workload.name, workload.name, lambda data: workload, lambda: workload)


def _compared(
    panel: Panel, workload: Workload, measured: Measurement, rows: list[Row], *, quick: bool
) -> PanelComparison:
    return PanelComparison(
        panel.name,
        workload.name,
        quick,
        workload.criterion,
        _largest(workload),
        measured,
        rows,
        panel.words(quick=quick),
        len(workload.blocks),
    )


def _file_name(workload: str) -> str:
    return re.sub(r"[^\w.-]+", "-", workload)


def _largest(workload: Workload) -> float:
    sizes = workload.blocks.sizes
    return float(sizes.max() / sizes.sum())


def criteria(panels: Sequence[PanelComparison]) -> Row:
    """The criterion of each panel and the iterations that unperturbed runs take to it."""
    return {p.panel: f"{p.workload} to {p.criterion:g} in {_range(p.measurement)}" for p in panels}


def _range(measured: Measurement) -> str:
    shortest, longest = measured.lengths.min(), measured.lengths.max()
    return f"{shortest}" if shortest == longest else f"{shortest} to {longest}, {measured.unperturbed:.1f} on average"


def trials_folder(options: Options) -> Path:
    """Where finished trials are kept: beside the result, so that experiments in one place share them."""
    folder = options.out.parent / "trials"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"cannot write to {folder}: {error.strerror}; name another folder with --out") from error
    return folder


def _row(panel: str, measured: Measurement, strategy: Strategy, baseline: Strategy) -> Row:
    costs: Costs = measured.of(strategy)
    mean = interval.mean(interval.finite(costs.cost))
    whole = interval.mean(interval.finite(costs.whole))
    saved = interval.reduction(*interval.paired(costs.cost, measured.of(baseline).cost))
    return {
        "panel": panel,
        "unperturbed": measured.unperturbed,
        **_named(strategy),
        "trials": len(costs.cost),
        "unconverged": costs.unconverged,
        **dict(zip(("cost_mean", "cost_low", "cost_high"), mean, strict=True)),
        "whole_mean": whole.value,
        **dict(zip(("reduction", "reduction_low", "reduction_high"), saved, strict=True)),
        "size_mean": float(costs.size.mean()),
        "bound_mean": float(costs.bound.mean()),
    }


def _named(strategy: Strategy) -> Row:
    return {
        "recovery": strategy.recovery,
        "policy": strategy.policy.ranking,
        "fraction": str(strategy.policy.fraction),
        "frequency": int(1 / strategy.policy.fraction),
        "saves": strategy.policy.saves,
        "lost": str(strategy.lost),
    }


def _csv(panels: Sequence[PanelComparison], strategies: Sequence[Strategy]) -> str:
    """Every trial: its failure, the number of blocks it lost, the size of its perturbation, the bound and the cost.

    Which blocks these are follows from the seed: see `lost_in`. A trial that did not converge has an infinite cost.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["panel", *_named(strategies[0]), "trial", "step", "lost_blocks", "size", "bound", "cost", "whole"])
    for compared in panels:
        for strategy in strategies:
            costs = compared.measurement.of(strategy)
            lost = len(lost_in_trial(0, 0, compared.blocks, strategy.lost))
            for trial, step in enumerate(compared.measurement.steps):
                numbers = (f"{value[trial]:.6g}" for value in (costs.size, costs.bound, costs.cost, costs.whole))
                table.writerow([compared.panel, *_named(strategy).values(), trial, step, lost, *numbers])
    return text.getvalue()


COLUMNS = {  # of the table: from a row of a result
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


def cost_table(panels: Sequence[PanelComparison]) -> ResultTable:
    """A row for each strategy on each panel: its mean cost in iterations with its 95 % interval, and its reduction."""
    rows = [[_shown(row[key]) for key in COLUMNS.values()] for compared in panels for row in compared.rows]
    return ResultTable("Iteration costs, with 95 % confidence intervals", list(COLUMNS), rows)


def unconverged_remarks(panels: Sequence[PanelComparison]) -> list[str]:
    """A line for each strategy some of whose trials did not reach the criterion."""
    return [_unconverged(compared, row) for compared in panels for row in compared.rows if row["unconverged"]]


def named(strategy: Strategy) -> str:
    """A strategy for a reader."""
    policy = strategy.policy
    saves = "full checkpoints" if policy.fraction == 1 else f"{policy.ranking} checkpoints of {policy.fraction}"
    return f"{saves}, {strategy.recovery} recovery, {strategy.lost} lost"


def _unconverged(compared: PanelComparison, row: Row) -> str:
    others = "no mean or reduction is given" if isnan(row["cost_mean"]) else "means and reductions are of the others"
    return (
        f"{compared.label}, {row['policy']} {row['fraction']}, {row['recovery']} recovery, {row['lost']} lost: "
        f"{row['unconverged']} of {row['trials']} trials did not reach the criterion within {LIMIT} times the iterations of an "
        f"unperturbed run; {others}."
    )


def _shown(value: str | float | int) -> str | float | int | None:
    """A value with the digits that a reader needs; none where there is no number."""
    if isinstance(value, float):
        return None if isnan(value) else round(value, 4)
    return value
