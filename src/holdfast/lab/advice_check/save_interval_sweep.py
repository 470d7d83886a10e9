"""Goodput at save intervals around the recommended one, simulated from measured costs and in real runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.advice.prices import restart_time, save_delay
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts
from holdfast.advice.saving import SaveCosts, best_interval
from holdfast.blocks.division import Floats
from holdfast.cost.breakdown import cost_breakdown
from holdfast.faults.schedule import Failure
from holdfast.lab.advice_check.failure_cases import KILLED, run_config
from holdfast.lab.experiment import Meter, Options

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
OFTEN = 15.0  # mean time between failures, as a multiple of a restart: short enough for the interval to matter
FAILURES, REPEATS = 5, 3  # the mean number of failures of a real run, and the repeats of the real sweep
RESAMPLED = 4000  # number of simulated failures


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The goodput at several save intervals, relative to a run without saves and failures."""

    workload: str
    how: str  # simulated or measured
    mtbf: float  # mean time between failures
    every: list[int]  # steps between two saves
    goodput: Floats  # a row for each repeat and a column for each interval

    @property
    def means(self) -> Floats:
        return np.asarray(self.goodput.mean(axis=0))

    @property
    def recommended(self) -> float:
        """The goodput at the recommended interval as a fraction of the best goodput of the sweep."""
        return float(self.means[FACTORS.index(1.0)] / self.means.max())


def intervals_to_sweep(costs: RunCosts) -> tuple[float, list[int]]:
    """Return the mean time between failures to simulate (in seconds), and the save intervals to compare (in steps)."""
    question = Question()
    restart, stall = restart_time(costs, question).value, save_delay(costs, question).value
    mtbf, durable = OFTEN * restart, costs.durable.value if costs.durable else 0.0
    saving = SaveCosts(step=costs.step.value, stall=stall, mtbf=mtbf, restart=restart, durable=durable)
    best = best_interval(saving).best
    return mtbf, [max(1, round(best * factor)) for factor in FACTORS]


def resampled_sweep(name: str, costs: RunCosts, restarts: Sequence[float], seed: int) -> Sweep:
    """Simulate random failures with measured step, save and restart times; return the goodput by save interval."""
    mtbf, every = intervals_to_sweep(costs)
    rng = np.random.default_rng(seed)
    shares = [[_useful_share(costs, interval, mtbf, restarts, rng) for interval in every] for _ in range(5)]
    return Sweep(name, "resampled", mtbf, every, np.array(shares))


def _useful_share(
    costs: RunCosts, every: int, mtbf: float, restarts: Sequence[float], rng: np.random.Generator
) -> float:
    step, save = costs.step.value, costs.stall.value if costs.stall else 0.0
    durable = costs.durable.value if costs.durable else 0.0
    gaps = rng.exponential(mtbf, RESAMPLED)
    again = rng.choice(np.asarray(restarts or [mtbf / OFTEN]), RESAMPLED)
    cycle = every * step + save
    # Between two failures, training has the time that the restart leaves; a save counts once it is durable.
    up = np.maximum(0.0, gaps - again)
    saves = np.maximum(0.0, np.floor((up - durable) / cycle))
    return float((saves * every * step).sum() / gaps.sum())


def real_sweeps(name: str, costs: RunCosts, options: Options, meter: Meter) -> list[Sweep]:
    """Measure goodput in real runs at each interval, and return two sweeps that define goodput differently.

    The first divides the usual time of the steps by the time of the run, and varies on a shared machine. The second
    divides the own training time of the run; it does not show that steps are slower while a save is written."""
    from holdfast.lab.advice_check.run_driver import start_driver

    mtbf, every = intervals_to_sweep(costs)
    steps = round(FAILURES * mtbf / costs.step.value)
    progress = meter(f"{name}: save intervals", REPEATS * len(every))
    clock, own = np.zeros((2, REPEATS, len(every)))
    with start_driver(options.out) as execute:
        for repeat in range(REPEATS):
            failures = kill_schedule(mtbf / costs.step.value, steps, options.seed + repeat)  # for all intervals
            for place in np.roll(np.arange(len(every)), repeat).tolist():  # no interval is always the first
                config = run_config(name, failures=failures, steps=steps, save_every=every[place])
                cost = cost_breakdown(execute(config, f"{repeat}-{place}"))
                lasted = cost.wall - cost.seconds["startup"] - cost.seconds["closing"]
                clock[repeat, place] = steps * costs.step.value / lasted
                own[repeat, place] = (cost.seconds["compute"] + cost.seconds["data"]) / lasted
                progress(1)
    return [Sweep(name, "real", mtbf, every, clock), Sweep(name, "real, of its own time", mtbf, every, own)]


def kill_schedule(mean_gap: float, steps: int, seed: int) -> tuple[Failure, ...]:
    """Return kills at random steps below `steps`, with exponential gaps of `mean_gap` steps on average."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(mean_gap, 1000)).astype(int)
    unique = sorted({int(step) for step in at if 1 <= step < steps})
    return tuple(Failure(step=step, kind="kill", targets=(KILLED,)) for step in unique)
