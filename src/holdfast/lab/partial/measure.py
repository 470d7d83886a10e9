"""The iteration costs of strategies on one workload: every trial, its perturbation and its bound.

In go workloads, strategies and a number of trials; out come, for each workload, arrays with one number for each trial.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.blocks.division import Floats, Ids
from holdfast.lab.bounds.contraction import Contraction, contraction
from holdfast.lab.experiment import Meter, Options, Progress
from holdfast.lab.simulate.strategy import Strategy
from holdfast.lab.simulate.trajectory import Trajectory, trajectory
from holdfast.lab.simulate.trials import Outcomes, Trials
from holdfast.lab.trial_log import TrialLog
from holdfast.theory.bounds import iteration_cost_bound
from holdfast.workloads.workload import Workload

LIMIT = 10  # a trial that takes this many times as long as the run of stream 0 counts as never there


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Trials of one strategy: the cost of each, the size of its perturbation, and its bound by Theorem 3.2.

    Costs are in fractions of an iteration; `whole` has them as the paper counts, in whole iterations. A trial that did not
    reach the criterion within the limit has an infinite cost.
    """

    cost: Floats
    whole: Floats
    size: Floats
    bound: Floats

    @property
    def unconverged(self) -> int:
        """How many trials did not reach the criterion."""
        return int(np.isinf(self.cost).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """All strategies on one workload; trial i of each has the same unperturbed run and the same failure."""

    lengths: Ids  # of the unperturbed runs
    steps: Ids
    rate: Contraction
    concentration: float  # see `concentration`
    strategies: dict[Strategy, Costs]

    @property
    def unperturbed(self) -> float:
        """Iterations of an unperturbed run, on average."""
        return float(self.lengths.mean())

    def of(self, strategy: Strategy) -> Costs:
        """The costs of a strategy, however it is written."""
        return self.strategies[strategy.canonical]


def measure(
    name: str,
    workloads: Sequence[Workload],
    strategies: Iterable[Strategy],
    options: Options,
    trials: int,
    journal: Path,
    meter: Meter,
    early: int = 1,
) -> list[Measurement]:
    """Run every strategy on the same failures, for each of some workloads that train alike; a measurement for each.

    `name` is what the progress shows. Trials that the journal (a path) has from an earlier call are not run again, and
    those that are run are written to it. The rate and the concentration are those of one run, that of stream 0. Every
    second failure strikes before step `early`, if that is more than 1.
    """
    wanted = list(dict.fromkeys(strategy.canonical for strategy in strategies))
    run = trajectory(workloads[0], progress=meter(f"{name}: unperturbed run", 60))
    shared = None if workloads[0].stochastic else run
    all_trials = Trials(workloads, wanted, shared, LIMIT * run.length, options.seed, early=early)
    progress = meter(f"{name}: trials", trials * len(wanted) * len(workloads))
    outcomes = _outcomes(all_trials, trials, options, journal, progress)
    return [
        _measured(workload, run, [each[number] for each in outcomes], wanted, options)
        for number, workload in enumerate(workloads)
    ]


def _measured(
    workload: Workload, run: Trajectory, outcomes: Sequence[Outcomes], wanted: Sequence[Strategy], options: Options
) -> Measurement:
    rate = contraction(workload, run)
    return Measurement(
        np.array([trial.length for trial in outcomes]),
        np.array([trial.step for trial in outcomes]),
        rate,
        concentration(workload, run, options.interval),
        {each: _costs(each, outcomes, rate) for each in wanted},
    )


def _outcomes(
    all_trials: Trials, trials: int, options: Options, path: Path, progress: Progress
) -> list[list[Outcomes]]:
    """What came of every failure, for each workload, as far as possible from the journal."""
    with closing(TrialLog(path)) as journal:
        all_trials.known.update(journal.known)

        def hear(key: str, count: float) -> None:
            journal.note(key, count)
            progress(1)

        found = options.share_out(all_trials, all_trials.groups(trials, options.at_once), hear)
        return [each for group in found for each in group]


def _costs(strategy: Strategy, outcomes: Sequence[Outcomes], rate: Contraction) -> Costs:
    steps = np.array([trial.step for trial in outcomes])
    sizes = np.array([trial.sizes[strategy] for trial in outcomes])
    bound = np.full(len(outcomes), np.nan)
    if rate.c < 1:
        bound = iteration_cost_bound(rate.c, rate.distance, sizes[:, None], steps[:, None])
    counted = np.array([trial.counts[strategy] for trial in outcomes])
    without = np.array([trial.crossed for trial in outcomes]) - steps
    return Costs(counted - without, np.ceil(counted) - np.ceil(without), sizes, bound)


def concentration(workload: Workload, run: Trajectory, interval: int) -> float:
    """How much of the squared movement between two full checkpoints is that of the blocks that one small save could hold.

    The blocks that moved most a value come first, until they make up 1/interval of the values. Priority checkpoints help
    where this is near 1; not a number for a run shorter than the interval.
    """
    sizes, shares = workload.blocks.sizes, []
    for before, after in zip(run.states, run.states[interval:], strict=False):
        moved = np.square(workload.norm(workload.blocks, after, before))
        order = np.argsort(-moved / np.maximum(sizes, 1))
        held = np.cumsum(sizes[order]) <= sizes.sum() / interval
        shares.append(moved[order][held].sum() / moved.sum())
    return float(np.mean(shares)) if shares else float("nan")
