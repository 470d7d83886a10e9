"""Measure strategies on a workload: the cost, the perturbation and the bound of every trial."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from holdfast.blocks.division import Floats, Ids
from holdfast.lab.bounds.contraction import Contraction, contraction
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.simulate.strategy import Strategy
from holdfast.lab.simulate.trajectory import Trajectory, trajectory
from holdfast.lab.simulate.trials import Outcomes, Trials
from holdfast.theory.bounds import iteration_cost_bound
from holdfast.workloads.registry import code_of
from holdfast.workloads.workload import Workload

LIMIT = 10  # a trial that takes this many times as long as the run with seed 0 counts as not converged


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The trials of one strategy: their costs in iterations, the sizes of their perturbations, and their bounds.

    `cost` is fractional, and infinite for a trial that did not converge within the limit. `whole` is the cost in whole
    iterations, as the paper counts. `bound` is the bound of Theorem 3.2 in the SCAR paper."""

    cost: Floats
    whole: Floats
    size: Floats
    bound: Floats

    @property
    def unconverged(self) -> int:
        """The number of trials that did not converge."""
        return int(np.isinf(self.cost).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """The costs of each strategy; trial i fails after iteration `steps[i]` of a run that needs `lengths[i]` iterations.

    `rate` is the convergence rate. `concentration` is a fraction from 0 to 1: how much of the squared movement of all
    blocks is due to the few blocks that moved most."""

    lengths: Ids
    steps: Ids
    rate: Contraction
    concentration: float  # see `concentration`
    strategies: dict[Strategy, Costs]

    @property
    def unperturbed(self) -> float:
        """The mean length of a run without failures, in iterations."""
        return float(self.lengths.mean())

    def costs_of(self, strategy: Strategy) -> Costs:
        """Return the costs of `strategy`, or of an equivalent strategy that was measured in its place."""
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
    """Run every strategy on the same failures, and return a measurement for each of `workloads`.

    The workloads train alike and differ only in their blocks. Progress is shown under `name`. Trials found in the log
    called `log` are not run again, and new ones are written to it. The convergence rate and the concentration (see
    `concentration`) come from a run with random seed 0. If `early` is more than 1, every second failure happens before
    step `early`."""
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
    """Return the fraction of the squared movement that is in the most moved blocks, over `interval` iterations.

    These blocks hold 1/`interval` of all values, as much as one partial save. Priority checkpoints help if the fraction
    is near 1. Return NaN for a run shorter than `interval`."""
    sizes, shares = workload.blocks.sizes, []
    for before, after in zip(run.states, run.states[interval:], strict=False):
        moved = np.square(workload.norm(workload.blocks, after, before))
        order = np.argsort(-moved / np.maximum(sizes, 1))
        held = np.cumsum(sizes[order]) <= sizes.sum() / interval
        shares.append(moved[order][held].sum() / moved.sum())
    return float(np.mean(shares)) if shares else float("nan")
