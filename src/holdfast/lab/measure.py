"""The iteration costs of strategies on one workload: every trial, its perturbation and its bound."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.blocks import Floats, Ids
from holdfast.lab.experiment import Meter, Options, Progress
from holdfast.lab.journal import Journal
from holdfast.rate import Rate, fitted_rate
from holdfast.simulate.flight import Flights, Flown
from holdfast.simulate.pool import share_out
from holdfast.simulate.strategy import Strategy
from holdfast.simulate.trajectory import Trajectory, proceed, trajectory
from holdfast.theory import full_size, iteration_cost_bound
from holdfast.workloads.workload import Workload

LIMIT = 10  # a trial that takes this many times as long as the run of stream 0 counts as never there
BEYOND = 3  # the iterate this many times as far as the criterion stands for the optimum when c is estimated


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Trials of one strategy: the cost of each, the size of its perturbation, and its bound by Theorem 3.2.

    Costs are in fractions of an iteration; `whole` has them as the paper counts, in whole iterations.
    """

    cost: Floats
    whole: Floats
    size: Floats
    bound: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """All strategies on one workload; trial i of each has the same unperturbed run and the same failure."""

    lengths: Ids  # of the unperturbed runs
    steps: Ids
    rate: Rate
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
) -> list[Measurement]:
    """Run every strategy on the same failures, for each of some workloads that train alike.

    The rate and the concentration are those of one run, that of stream 0.
    """
    wanted = list(dict.fromkeys(strategy.canonical for strategy in strategies))
    run = trajectory(workloads[0], progress=meter(f"{name}: unperturbed run", 60))
    shared = None if workloads[0].stochastic else run
    flights = Flights(workloads, wanted, shared, LIMIT * run.length, options.seed)
    progress = meter(f"{name}: trials", trials * len(wanted) * len(workloads))
    flown = _flown(flights, trials, options.jobs, journal, progress)
    return [
        _measured(workload, run, [trial[number] for trial in flown], wanted, options)
        for number, workload in enumerate(workloads)
    ]


def _measured(
    workload: Workload, run: Trajectory, flown: Sequence[Flown], wanted: Sequence[Strategy], options: Options
) -> Measurement:
    rate = contraction(workload, run)
    return Measurement(
        np.array([trial.length for trial in flown]),
        np.array([trial.step for trial in flown]),
        rate,
        concentration(workload, run, options.interval),
        {each: _costs(each, flown, rate) for each in wanted},
    )


def _flown(flights: Flights, trials: int, jobs: int, path: Path, progress: Progress) -> list[list[Flown]]:
    """Every trial, for each workload, as far as possible from the journal."""
    with closing(Journal(path)) as journal:
        flights.known.update(journal.known)

        def hear(key: str, count: float) -> None:
            journal.note(key, count)
            progress(1)

        found = share_out(flights, flights.numbers(trials, jobs), jobs=jobs, hear=hear)
        return [trial for flight in found for trial in flight]


def _costs(strategy: Strategy, flown: Sequence[Flown], rate: Rate) -> Costs:
    steps = np.array([trial.step for trial in flown])
    sizes = np.array([trial.sizes[strategy] for trial in flown])
    bound = np.full(len(flown), np.nan)
    if rate.c < 1:
        bound = iteration_cost_bound(rate.c, rate.distance, sizes[:, None], steps[:, None])
    counted = np.array([trial.counts[strategy] for trial in flown])
    without = np.array([trial.crossed for trial in flown]) - steps
    return Costs(counted - without, np.ceil(counted) - np.ceil(without), sizes, bound)


def contraction(workload: Workload, run: Trajectory) -> Rate:
    """The contraction rate, from the distances to an iterate far beyond the criterion."""
    far = proceed(workload, run.states[-1], run.length, BEYOND * run.length)
    return fitted_rate([full_size(workload.norm(workload.blocks, state, far)) for state in run.states], slice(0, None))


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
