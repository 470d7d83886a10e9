"""Is the recommended save interval the best? Goodput over a sweep around it, resampled from what runs cost, and real."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from holdfast.advice.prices import restart_time, save_delay
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts
from holdfast.advice.saving import SaveCosts, best_interval
from holdfast.blocks.division import Floats
from holdfast.cost.breakdown import cost_breakdown
from holdfast.faults.schedule import Failure
from holdfast.lab.advice_check.killed_runs import KILLED, run_config, run_to_completion
from holdfast.lab.experiment import Meter, Options

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
OFTEN = 15.0  # restarts' worth of time between two failures: so often that the interval matters
FAILURES, REPEATS = 5, 3  # of each real run, on average; of the real sweep
STRETCH = 4000  # failures that are resampled


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Committed steps a second at intervals around the recommended one, relative to that without saves and failures."""

    workload: str
    how: str
    mtbf: float
    every: list[int]
    goodput: Floats  # (repeats, intervals)

    @property
    def means(self) -> Floats:
        """Of each interval, over the repeats."""
        return np.asarray(self.goodput.mean(axis=0))

    @property
    def recommended(self) -> float:
        """Goodput at the recommended interval as a part of the best of the sweep."""
        return float(self.means[FACTORS.index(1.0)] / self.means.max())


def intervals_to_sweep(costs: RunCosts) -> tuple[float, list[int]]:
    """The time between failures that a sweep is done with, and intervals around the one that is recommended for it."""
    question = Question()
    mtbf = OFTEN * restart_time(costs, question).value
    saving = SaveCosts(
        step=costs.step.value,
        stall=save_delay(costs, question).value,
        mtbf=mtbf,
        restart=restart_time(costs, question).value,
        durable=costs.durable.value if costs.durable else 0.0,
    )
    best = best_interval(saving).best
    return mtbf, [max(1, round(best * factor)) for factor in FACTORS]


def resampled_sweep(name: str, costs: RunCosts, restarts: Sequence[float], seed: int) -> Sweep:
    """The sweep with steps, saves and restarts as they were measured, and failures that strike whenever they do."""
    mtbf, every = intervals_to_sweep(costs)
    rng = np.random.default_rng(seed)
    shares = [[_share(costs, each, mtbf, restarts, rng) for each in every] for _ in range(5)]
    return Sweep(name, "resampled", mtbf, every, np.array(shares))


def _share(costs: RunCosts, every: int, mtbf: float, restarts: Sequence[float], rng: np.random.Generator) -> float:
    """Seconds of steps that count, of all seconds, over many failures."""
    step, save = costs.step.value, costs.stall.value if costs.stall else 0.0
    durable = costs.durable.value if costs.durable else 0.0
    gaps = rng.exponential(mtbf, STRETCH)
    again = rng.choice(np.asarray(restarts or [mtbf / OFTEN]), STRETCH)
    cycle = every * step + save
    # In a gap training runs for what the restart leaves of it; a save counts once it is durable.
    up = np.maximum(0.0, gaps - again)
    saves = np.maximum(0.0, np.floor((up - durable) / cycle))
    return float((saves * every * step).sum() / gaps.sum())


def real_sweeps(name: str, costs: RunCosts, options: Options, meter: Meter) -> list[Sweep]:
    """The sweep in real runs, once by the clock and once by what each run spent its own time on.

    All intervals of a repeat meet the same failures. By the clock a machine that others use too makes runs differ; what
    part of its own time a run trains hardly depends on that, and leaves out that steps are slower beside a save.
    """
    from holdfast.lab.advice_check.run_driver import start_driver

    mtbf, every = intervals_to_sweep(costs)
    steps = round(FAILURES * mtbf / costs.step.value)
    progress = meter(f"{name}: save intervals", REPEATS * len(every))
    clock, own = np.zeros((2, REPEATS, len(every)))
    with (
        TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder,
        start_driver(options.out / "runs.log") as do,
    ):
        for repeat in range(REPEATS):
            failures = kill_schedule(mtbf / costs.step.value, steps, options.seed + repeat)
            for place in np.roll(np.arange(len(every)), repeat).tolist():  # no interval is always the first
                told = run_config(name, failures=failures, steps=steps, save_every=every[place])
                cost = cost_breakdown(run_to_completion(do, told, Path(folder).absolute() / f"{repeat}-{place}"))
                lasted = cost.wall - cost.seconds["startup"] - cost.seconds["closing"]
                clock[repeat, place] = steps * costs.step.value / lasted
                own[repeat, place] = (cost.seconds["compute"] + cost.seconds["data"]) / lasted
                progress(1)
    return [Sweep(name, "real", mtbf, every, clock), Sweep(name, "real, of its own time", mtbf, every, own)]


def kill_schedule(mean_gap: float, steps: int, seed: int) -> tuple[Failure, ...]:
    """Kills with exponential gaps, counted in steps that count."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(mean_gap, 1000)).astype(int)
    unique = sorted({int(each) for each in at if 1 <= each < steps})
    return tuple(Failure(step=each, kind="kill", targets=(KILLED,)) for each in unique)
