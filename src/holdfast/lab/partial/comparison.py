"""Compare strategies on panels (pairs of a model and a data set): rows for all strategies, and every trial as CSV."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from holdfast.lab import confidence
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.measure import Measurement, measure
from holdfast.lab.partial.panels import Panel, distinct_panels
from holdfast.lab.result import Row
from holdfast.lab.simulate.strategy import Strategy, loss_order, lost_count
from holdfast.report.files import prepare, replace_text


@dataclass(frozen=True, slots=True, eq=False)
class PanelComparison:
    """The results of all strategies for a model on a data set. `largest_block` is a fraction of the model size."""

    panel: str
    workload: str
    quick: bool
    criterion: float
    largest_block: float
    measurement: Measurement
    rows: list[Row]
    title: str = ""  # the title in figures
    blocks: int = 0

    @property
    def label(self) -> str:
        """The name of the model and data set in reports, marked if it is a quick run on smaller data."""
        return f"{self.panel}, quick on {self.workload}" if self.quick else self.panel

    def row(self, strategy: Strategy) -> Row:
        """Return the row of the result table that holds the costs of `strategy`."""
        return next(row for row in self.rows if row.items() >= strategy_columns(strategy).items())


def compare_strategies(
    options: Options, meter: Meter, trials: int, strategies: Sequence[Strategy], baseline: Strategy, *, early: int = 1
) -> list[PanelComparison]:
    """Measure strategies on the chosen panels (models with data sets) or the user's own workload.

    Cost reductions are relative to `baseline`. If `early` is more than 1, every second failure happens before step
    `early`."""
    folder = prepare(options.out)
    is_quick = options.quick and options.workload is None
    chosen = distinct_panels(options.panels, quick=is_quick)
    if (own := options.workload) is not None:
        chosen = [Panel(own.name, own.name, own.name, lambda data: own, lambda: own)]
    loaded = ((panel, panel.workload(options.data, quick=is_quick)) for panel in chosen)
    comparisons = []
    # Neighbouring panels with the same workload name train alike and differ only in their blocks.
    for name, group in groupby(loaded, key=lambda pair: pair[1].name):
        panels, workloads = zip(*group, strict=True)
        log, title = re.sub(r"[^\w.-]+", "-", name), " and ".join(panel.name for panel in panels)
        measurements = measure(title, workloads, [baseline, *strategies], options, trials, log, meter, early)
        for panel, workload, measured in zip(panels, workloads, measurements, strict=True):
            rows = [cost_row(panel.name, measured, strategy, baseline) for strategy in strategies]
            sizes = workload.blocks.sizes
            comparisons.append(
                PanelComparison(
                    panel=panel.name,
                    workload=workload.name,
                    quick=is_quick,
                    criterion=workload.criterion,
                    largest_block=float(sizes.max() / sizes.sum()),
                    measurement=measured,
                    rows=rows,
                    title=panel.small if is_quick else panel.title,
                    blocks=len(workload.blocks),
                )
            )
    replace_text(folder / "trials.csv", _csv(comparisons, strategies))
    replace_text(folder / "lost_blocks.csv", _lost_csv(comparisons, options.seed))
    return comparisons


def cost_row(panel: str, measured: Measurement, strategy: Strategy, baseline: Strategy) -> Row:
    """Return the table row of `strategy` for one panel (workload): mean costs, and the reduction against `baseline`."""
    costs = measured.costs_of(strategy)
    mean = confidence.mean(confidence.finite(costs.cost))
    whole = confidence.mean(confidence.finite(costs.whole))
    reduction = confidence.reduction(*confidence.paired(costs.cost, measured.costs_of(baseline).cost))
    return {
        "panel": panel,
        "unperturbed": measured.unperturbed,
        **strategy_columns(strategy),
        "trials": len(costs.cost),
        "unconverged": costs.unconverged,
        **dict(zip(("cost_mean", "cost_low", "cost_high"), mean, strict=True)),
        "whole_mean": whole.value,
        **dict(zip(("reduction", "reduction_low", "reduction_high"), reduction, strict=True)),
        "size_mean": float(costs.size.mean()),
        "bound_mean": float(costs.bound.mean()),
    }


def strategy_columns(strategy: Strategy) -> Row:
    """Return the cells of a result row that identify a strategy."""
    return {
        "recovery": strategy.recovery,
        "policy": strategy.policy.name,
        "fraction": str(strategy.policy.fraction),
        "frequency": int(1 / strategy.policy.fraction),
        "saves": strategy.policy.saves,
        "lost": str(strategy.lost),
    }


def _csv(comparisons: Sequence[PanelComparison], strategies: Sequence[Strategy]) -> str:
    """Return a CSV text with a line for each trial: its failure, number of lost blocks, perturbation, bound and cost.

    The ids of the lost blocks are in `lost_blocks.csv`. A trial that did not converge costs infinity.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    columns = [*strategy_columns(strategies[0]), "trial", "step", "lost_blocks", "size", "bound", "cost", "whole"]
    table.writerow(["panel", *columns])
    for comparison in comparisons:
        for strategy in strategies:
            costs = comparison.measurement.costs_of(strategy)
            lost = lost_count(comparison.blocks, strategy.lost)
            for trial, step in enumerate(comparison.measurement.steps):
                numbers = (f"{values[trial]:.6g}" for values in (costs.size, costs.bound, costs.cost, costs.whole))
                table.writerow([comparison.panel, *strategy_columns(strategy).values(), trial, step, lost, *numbers])
    return text.getvalue()


def _lost_csv(comparisons: Sequence[PanelComparison], seed: int) -> str:
    """Return a CSV text with the order in which each trial loses blocks; a failure takes the first `lost_blocks`."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["panel", "trial", "step", "order"])
    for comparison in comparisons:
        for trial, step in enumerate(comparison.measurement.steps):
            order = " ".join(map(str, loss_order(seed, trial, comparison.blocks)))
            table.writerow([comparison.panel, trial, step, order])
    return text.getvalue()
