"""Strategies compared on panels: every panel measured in turn, as rows of a table and as single trials."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.lab import interval
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.measure import Costs, Measurement, measure
from holdfast.lab.panels import chosen
from holdfast.lab.result import Row, prepare, replace_text
from holdfast.simulate.strategy import Strategy


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """What one panel showed: its measurement, and a row for each strategy."""

    panel: str
    workload: str
    quick: bool
    criterion: float
    measurement: Measurement
    rows: list[Row]

    @property
    def label(self) -> str:
        """The panel for a reader, who must not take a quick run for the real one."""
        return f"{self.panel}, quick on {self.workload}" if self.quick else self.panel

    def row(self, strategy: Strategy) -> Row:
        """The row of a strategy."""
        return next(row for row in self.rows if row.items() >= _named(strategy).items())


def compare(
    options: Options, meter: Meter, trials: int, strategies: Sequence[Strategy], baseline: Strategy
) -> list[Compared]:
    """Measure strategies on the chosen panels; reductions are against the baseline."""
    folder = prepare(options.out)
    found = []
    for panel in chosen(options.panels):
        workload = panel.workload(options.data, quick=options.quick)
        journal = folder / f"{panel.name}.jsonl"
        measured = measure(panel.name, workload, [baseline, *strategies], options, trials, journal, meter)
        rows = [_row(panel.name, measured, each, baseline) for each in strategies]
        found.append(Compared(panel.name, workload.name, options.quick, workload.criterion, measured, rows))
    replace_text(folder / "trials.csv", _csv(found, strategies))
    return found


def bound_remarks(panels: Sequence[Compared]) -> list[str]:
    """How Theorem 3.2, with the estimated c, predicts the costs of each panel."""
    return [_bound_remark(each) for each in panels]


def _bound_remark(compared: Compared) -> str:
    costs = list(compared.measurement.strategies.values())
    cost, bound = np.concatenate([c.cost for c in costs]), np.concatenate([c.bound for c in costs])
    rate = compared.measurement.rate
    if np.isnan(bound).any():
        return f"{compared.label}: distances do not shrink (c = {rate.c:.3f}), so Theorem 3.2 predicts nothing."
    return (
        f"{compared.label}: c = {rate.c:.4f}; {np.mean(cost <= bound + 1):.0%} of trials are within the bound of "
        f"Theorem 3.2, at a median of {np.median(cost / np.maximum(bound, 1e-9)):.2f} of it."
    )


def rounding_remarks(panels: Sequence[Compared], strategy: Strategy) -> list[str]:
    """How much of a panel's result is the rounding of costs to whole iterations."""
    return [_rounding_remark(each, strategy) for each in panels]


def _rounding_remark(compared: Compared, strategy: Strategy) -> str:
    costs = compared.measurement.of(strategy).cost
    return (
        f"{compared.label}: {int(np.sum(costs == 1))} of {len(costs)} trials cost exactly 1 iteration, the least above 0; the "
        f"unperturbed run is under the criterion by {compared.measurement.headroom:.2f} of an iteration, and any cost above "
        "that counts as 1."
    )


def early_remarks(panels: Sequence[Compared], strategy: Strategy, baseline: Strategy) -> list[str]:
    """How much of a panel's result is due to failures before the first checkpoint, which go back to the start."""
    return [_early_remark(each, strategy, baseline) for each in panels]


def _early_remark(compared: Compared, strategy: Strategy, baseline: Strategy) -> str:
    measured = compared.measurement
    later = measured.steps >= baseline.policy.interval
    costs, full = measured.of(strategy).cost, measured.of(baseline).cost
    if later.all() or not later.any():
        return f"{compared.label}: {'no' if later.all() else 'every'} failure came before the first full checkpoint."
    saved = interval.reduction(costs[later], full[later])
    return (
        f"{compared.label}: {int((~later).sum())} of {len(later)} failures came before the first full checkpoint, at a mean "
        f"cost of {costs[~later].mean():.1f} ({full[~later].mean():.1f} by full recovery); without them the reduction is "
        f"{saved.value:.2f} ({saved.low:.2f} to {saved.high:.2f})."
    )


def _row(panel: str, measured: Measurement, strategy: Strategy, baseline: Strategy) -> Row:
    costs: Costs = measured.of(strategy)
    mean, saved = interval.mean(costs.cost), interval.reduction(costs.cost, measured.of(baseline).cost)
    return {
        "panel": panel,
        "unperturbed": measured.unperturbed,
        **_named(strategy),
        "trials": len(costs.cost),
        **dict(zip(("cost_mean", "cost_low", "cost_high"), mean, strict=True)),
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
        "lost": str(strategy.lost),
    }


def _csv(panels: Sequence[Compared], strategies: Sequence[Strategy]) -> str:
    """Every trial: its failure, the size of its perturbation, the bound and the cost."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["panel", *_named(strategies[0]), "trial", "step", "size", "bound", "cost"])
    for compared in panels:
        for strategy in strategies:
            costs = compared.measurement.of(strategy)
            for trial, step in enumerate(compared.measurement.steps):
                numbers = (f"{value[trial]:.6g}" for value in (costs.size, costs.bound, costs.cost))
                table.writerow([compared.panel, *_named(strategy).values(), trial, step, *numbers])
    return text.getvalue()
