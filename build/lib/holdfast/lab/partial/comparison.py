"""Compare strategies on panels (pairs of a model and a data set): costs, perturbations and bounds of every trial."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from holdfast.blocks.division import Floats, Ids
from holdfast.lab import confidence
from holdfast.lab.bounds.cost_bound import Contraction, contraction
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.panels import Panel, distinct_panels
from holdfast.lab.result import Row
from holdfast.lab.simulate.lanes import Trajectory, trajectory
from holdfast.lab.simulate.strategy import Strategy, loss_order, lost_count
from holdfast.lab.simulate.trials import Outcomes, Trials
from holdfast.report.files import csv_text, prepare, replace_text
from holdfast.theory.bounds import iteration_cost_bound
from holdfast.workloads.registry import code_of
from holdfast.workloads.workload import Workload

LIMIT = 10  # a trial that takes this many times as long as the run with seed 0 counts as not converged


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The trials of one strategy: the cost of each failure in iterations, its upper bound, and the perturbation."""

    cost: Floats  # fractional; infinite for a trial that did not converge
    whole: Floats  # in whole iterations, as the paper counts
    size: Floats
    bound: Floats  # of Theorem 3.2 in the SCAR paper

    @property
    def unconverged(self) -> int:
        return int(np.isinf(self.cost).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The costs of failures by strategy.

    Trial i needs `lengths[i]` iterations without a failure, and fails after `steps[i]`."""

    lengths: Ids
    steps: Ids
    rate: Contraction
    concentration: float  # see `concentration`
    strategies: dict[Strategy, Costs]

    @property
    def unperturbed(self) -> float:
        return float(self.lengths.mean())

    def costs_of(self, strategy: Strategy) -> Costs:
        """Return the measured costs of `strategy`, or of a measured strategy with the same effect."""
        return self.strategies[strategy.canonical]


def measure(
    name: str,
    workloads: Sequence[Workload],
    strategies: Iterable[Strategy],
    options: Options,
    trials: int,
    log: str,
    meter: Meter,
    early: int = 1,
) -> list[Measurement]:
    """Simulate the same failures with every strategy, and return a measurement for each workload.

    The workloads train alike and differ only in their blocks (parts of the state). `name` labels the progress. Trials
    in the log file `log` are not run again. With `early` above 1, every second failure happens before step `early`."""
    wanted = list(dict.fromkeys(strategy.canonical for strategy in strategies))
    run = trajectory(workloads[0], progress=meter(f"{name}: unperturbed run", 60))
    shared = None if workloads[0].stochastic else run
    all_trials = Trials(workloads, wanted, shared, LIMIT * run.length, options.seed, early=early)
    progress = meter(f"{name}: trials", trials * len(wanted) * len(workloads))
    with closing(options.open_log(log, code_of(workloads[0]))) as known:
        all_trials.known.update(known.known)

        def record(key: str, count: float) -> None:
            known.record(key, count)
            progress(1)

        groups = options.map(all_trials, all_trials.groups(trials, options.parallelism), record)
    outcomes = [by_workload for group in groups for by_workload in group]
    return [
        _measured(workload, run, [by_workload[number] for by_workload in outcomes], wanted, options.interval)
        for number, workload in enumerate(workloads)
    ]


def _measured(
    workload: Workload, run: Trajectory, outcomes: Sequence[Outcomes], wanted: Sequence[Strategy], interval: int
) -> Measurement:
    rate, steps = contraction(workload, run), np.array([trial.step for trial in outcomes])
    without = np.array([trial.crossed for trial in outcomes]) - steps
    costs = {}
    for strategy in wanted:
        sizes = np.array([trial.sizes[strategy] for trial in outcomes])
        bound = np.full(len(outcomes), np.nan)
        if rate.c < 1:
            bound = iteration_cost_bound(rate.c, rate.distance, sizes[:, None], steps[:, None])
        count = np.array([trial.counts[strategy] for trial in outcomes])
        costs[strategy] = Costs(count - without, np.ceil(count) - np.ceil(without), sizes, bound)
    lengths = np.array([trial.length for trial in outcomes])
    return Measurement(lengths, steps, rate, concentration(workload, run, interval), costs)


def concentration(workload: Workload, run: Trajectory, interval: int) -> float:
    """Return the fraction of the state's squared change over `interval` iterations that is in the most changed blocks.

    These blocks hold 1/`interval` of all values. If the fraction is near 1, it helps to save these blocks first."""
    sizes, shares = workload.blocks.sizes, []
    for before, after in zip(run.states, run.states[interval:], strict=False):
        moved = np.square(workload.norm(workload.blocks, after, before))
        order = np.argsort(-moved / np.maximum(sizes, 1))
        held = np.cumsum(sizes[order]) <= sizes.sum() / interval
        shares.append(moved[order][held].sum() / moved.sum())
    return float(np.mean(shares)) if shares else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class PanelComparison:
    """The costs of failures with all strategies for one model on one data set."""

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
        return f"{self.panel}, quick on {self.workload}" if self.quick else self.panel

    def row(self, strategy: Strategy) -> Row:
        return next(row for row in self.rows if row.items() >= strategy_columns(strategy).items())


def compare_strategies(
    options: Options, meter: Meter, trials: int, strategies: Sequence[Strategy], baseline: Strategy, *, early: int = 1
) -> list[PanelComparison]:
    """Measure strategies on the chosen models and data sets, or on the user's own workload.

    Cost reductions are relative to `baseline`. If `early` is above 1, every second failure happens before step
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
    # A trial that did not converge costs infinity. A failure takes the first `lost_blocks` blocks in the order of losses.
    columns = [*strategy_columns(strategies[0]), "trial", "step", "lost_blocks", "size", "bound", "cost", "whole"]
    replace_text(folder / "trials.csv", csv_text(["panel", *columns], _trials(comparisons, strategies)))
    orders = [
        [comparison.panel, trial, step, " ".join(map(str, loss_order(options.seed, trial, comparison.blocks)))]
        for comparison in comparisons
        for trial, step in enumerate(comparison.measurement.steps)
    ]
    replace_text(folder / "lost_blocks.csv", csv_text(["panel", "trial", "step", "order"], orders))
    return comparisons


def cost_row(panel: str, measured: Measurement, strategy: Strategy, baseline: Strategy) -> Row:
    """Return a table row for `strategy` on the model `panel`: mean costs, and the reduction relative to `baseline`."""
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
    return {
        "recovery": strategy.recovery,
        "policy": strategy.policy.name,
        "fraction": str(strategy.policy.fraction),
        "frequency": int(1 / strategy.policy.fraction),
        "saves": strategy.policy.saves,
        "lost": str(strategy.lost),
    }


def _trials(comparisons: Sequence[PanelComparison], strategies: Sequence[Strategy]) -> Iterator[Sequence[object]]:
    for comparison in comparisons:
        for strategy in strategies:
            costs = comparison.measurement.costs_of(strategy)
            lost = lost_count(comparison.blocks, strategy.lost)
            for trial, step in enumerate(comparison.measurement.steps):
                numbers = (f"{values[trial]:.6g}" for values in (costs.size, costs.bound, costs.cost, costs.whole))
                yield [comparison.panel, *strategy_columns(strategy).values(), trial, step, lost, *numbers]
