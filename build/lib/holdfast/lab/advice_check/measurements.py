"""Measurements of advice-check: costs of failures, predicted and measured, and goodput at several save intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from holdfast.advice.estimate import Estimate
from holdfast.advice.prices import RECOVERIES, Price, prices, restart_time, save_delay
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts, recoveries, restart_seconds, run_costs
from holdfast.advice.saving import SaveCosts, best_interval
from holdfast.blocks.division import Floats
from holdfast.blocks.policy import Policy
from holdfast.cost.breakdown import cost_breakdown
from holdfast.errors import WorkerLost
from holdfast.events import Event, Iterate, Serve, What
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from holdfast.lab.experiment import Meter, Options
from holdfast.lab.partial.comparison import measure
from holdfast.lab.partial.panels import PANELS
from holdfast.lab.result import Row
from holdfast.lab.simulate.lanes import trajectory
from holdfast.lab.simulate.strategy import Strategy
from holdfast.server.advice import RECOVERIES as SERVER_RECOVERIES
from holdfast.server.advice import ServedCosts, iterations_lost, served_costs
from holdfast.workloads.workload import Workload

if TYPE_CHECKING:
    from holdfast.runs.config import RunConfig

SCRIPT = Path(__file__).with_name("train.py")
WORKERS, STEPS, SAVE_EVERY = 3, 300, 40
WIDTHS = {"small": 128, "wide": 768}  # workloads, by the width of their network
# The ranges of steps for the two kills, far enough apart for a replacement worker to have joined.
EARLIER, LATER = (70, 120), (190, 260)
POINTS = ("boundary", "forward", "backward=0.3", "backward=0.5", "backward=0.8", "optimizer")
KILLED = WORKERS - 1  # the rank that is killed in a sweep
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
OFTEN = 15.0  # mean time between failures, as a multiple of a restart: short enough for the interval to matter
FAILURES, REPEATS = 5, 3  # the mean number of failures of a real run, and the repeats of the real sweep
RESAMPLED = 4000  # number of simulated failures
SIMULATED = ("mlr-mnist", "mf-movielens", "lda-20news", "cnn-mnist-shard")  # panels; their quick workloads are used


@dataclass(frozen=True, slots=True)
class AdviceCase:
    """The predicted and the measured cost of one failure, in seconds or iterations as `unit` says."""

    workload: str
    failure: str
    strategy: str
    unit: str
    predicted: Estimate
    measured: float

    @property
    def holds(self) -> bool:
        return self.predicted.holds(self.measured)

    def to_row(self) -> Row:
        case = {name: getattr(self, name) for name in ("workload", "failure", "strategy", "unit")}
        predicted = {"predicted": self.predicted.value, "low": self.predicted.low, "high": self.predicted.high}
        return {**case, **predicted, "basis": self.predicted.basis, "measured": self.measured, "holds": self.holds}


def coverage(cases: Sequence[AdviceCase]) -> float:
    """Return the fraction of cases whose measured cost lies in the predicted interval."""
    return sum(case.holds for case in cases) / len(cases) if cases else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class ObservedRuns:
    """The measured costs of runs with failures (`cases`) and, by workload, of a run without failures (`calm`)."""

    cases: list[AdviceCase]
    calm: dict[str, RunCosts]
    restarts: dict[str, list[float]]  # seconds of the restarts after kills, by workload


def run_and_kill(options: Options, meter: Meter) -> ObservedRuns:
    """Run each workload once without failures, and once per recovery method with two kills; return the costs."""
    names = list(WIDTHS)[:1] if options.quick else list(WIDTHS)
    progress = meter("runs that are killed", len(names) * (1 + len(RECOVERIES)))
    kills, observed = scheduled_kills(options.seed), ObservedRuns([], {}, {})
    for name in names:
        observed.calm[name] = costs = run_costs(history_of(run_config(name), options.out))
        progress(1)
        predicted = prices(costs, Question())
        for recovery in RECOVERIES:
            history = history_of(run_config(name, recovery, kills), options.out)
            observed.cases.extend(_killed_cases(name, costs, predicted[recovery], history))
            if recovery == "restart":
                restarts = map(restart_seconds, cost_breakdown(history).failures)
                observed.restarts[name] = [value for value in restarts if value is not None]
            progress(1)
    return observed


def history_of(config: "RunConfig", out: Path) -> Sequence[Event]:
    """Train as `config` says, in a temporary folder below `out`, and return the events of the run."""
    from holdfast.lab.supervised_run import execute
    from holdfast.supervise.preload import warm

    warm()  # otherwise only the first run would pay for the imports
    with TemporaryDirectory(dir=out, ignore_cleanup_errors=True) as folder:
        verdict = execute(config, Path(folder).absolute() / "run", out / "runs.log")
        if verdict.verdict != "completed":
            raise WorkerLost(f"a run with {config.recovery} was not completed: {verdict.verdict}: {verdict.because}")
        return read_history(Path(folder) / "run").events


def scheduled_kills(seed: int) -> tuple[Failure, ...]:
    """Return two kills of random workers at random steps: one early in the run, and one late."""
    rng, kills = np.random.default_rng((seed, 1)), []
    for steps in (EARLIER, LATER):
        step, point, rank = int(rng.integers(*steps)), str(rng.choice(POINTS)), int(rng.integers(1, WORKERS))
        kills.append(Failure(step=step, kind="kill", point=point, targets=(rank,)))
    return tuple(kills)


def run_config(
    name: str,
    recovery: str = "restart",
    failures: tuple[Failure, ...] = (),
    *,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
) -> "RunConfig":
    """Return the config of a run of the workload `name`, a key of `WIDTHS`, with the given injected failures."""
    from holdfast.runs.config import RunConfig

    return RunConfig(
        script=str(SCRIPT),
        args=(str(WIDTHS[name]), str(steps)),
        workers=WORKERS,
        recovery=recovery,
        save_every=save_every,
        failures=failures,
        max_restarts=len(failures) + 3,
    )


def _killed_cases(name: str, costs: RunCosts, price: Price, history: Sequence[Event]) -> list[AdviceCase]:
    cases = []
    for failure, seconds in recoveries(cost_breakdown(history), history, costs.step.value):
        work, where = failure.rework_steps + failure.samples_lost / costs.batch, f"killed in step {failure.step}"
        cases.append(AdviceCase(name, where, price.recovery, "seconds", price.seconds, seconds + failure.rework))
        cases.append(AdviceCase(name, where, price.recovery, "iterations", price.iterations, work))
    return cases


def strategies(interval: int) -> dict[str, Strategy]:
    """Return the checkpoint and recovery strategies to test, by name; `interval` is the steps between two saves."""
    whole = Policy(ranking="full", interval=interval)
    part = Policy(ranking="priority", interval=interval, fraction=Fraction(1, interval))
    return {
        "full": Strategy(policy=whole, recovery="full", lost=Fraction(1)),
        "partial, 1/4 lost": Strategy(policy=whole, recovery="partial", lost=Fraction(1, 4)),
        "partial, 1/2 lost": Strategy(policy=whole, recovery="partial", lost=Fraction(1, 2)),
        "partial, 1/2 lost, priority": Strategy(policy=part, recovery="partial", lost=Fraction(1, 2)),
    }


def simulate_failures(options: Options, meter: Meter) -> list[AdviceCase]:
    trials = options.trial_count(full=40, quick=5)
    workloads = (PANELS[name].workload(None, quick=True) for name in SIMULATED)
    return [case for workload in workloads for case in _simulated_cases(workload, options, trials, meter)]


def _simulated_cases(workload: Workload, options: Options, trials: int, meter: Meter) -> list[AdviceCase]:
    name, interval, wanted, cases = workload.name, options.interval, strategies(options.interval), []
    # The history that a parameter server would write with these losses, one iteration per second.
    losses = trajectory(workload).losses.tolist()
    plan = Serve(0, name, 1, 4, 1, 1, "full", "1", interval, "partial", 0, 0, losses[-1], len(losses))
    done: list[What] = [Iterate(at, loss, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0) for at, loss in enumerate(losses[1:])]
    costs = served_costs([Event(float(at), "controller", what) for at, what in enumerate([plan, *done])])
    (measured,) = measure(name, [workload], wanted.values(), options, trials, name, meter)
    for how, strategy in wanted.items():
        predicted = predicted_cost(costs, strategy)
        for step, cost in zip(measured.steps, measured.costs_of(strategy).cost, strict=True):
            where = f"after iteration {step}{', before the first save' if step < interval else ''}"
            cases.append(AdviceCase(name, where, how, "iterations", predicted, float(cost)))
    return cases


def predicted_cost(costs: ServedCosts, strategy: Strategy) -> Estimate:
    lost = float(strategy.lost) if strategy.recovery == SERVER_RECOVERIES[0] else 1.0
    return iterations_lost(costs.interval, lost, costs.rate, costs.noise)


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """The goodput at several save intervals, as a fraction of the goodput without saves and failures."""

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
    """Return the mean seconds between failures to simulate, and the save intervals (in steps) to compare."""
    question = Question()
    restart, stall = restart_time(costs, question).value, save_delay(costs, question).value
    mtbf, durable = OFTEN * restart, costs.durable.value if costs.durable else 0.0
    saving = SaveCosts(step=costs.step.value, stall=stall, mtbf=mtbf, restart=restart, durable=durable)
    best = best_interval(saving).best
    return mtbf, [max(1, round(best * factor)) for factor in FACTORS]


def resampled_sweep(name: str, costs: RunCosts, restarts: Sequence[float], seed: int) -> Sweep:
    """Simulate random failures with measured step, save and restart times; return the goodput at each save interval."""
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
    """Measure real runs at several save intervals, and return two sweeps, which define goodput differently.

    The first sweep divides the time that the steps take in a run without failures by the duration of the measured run.
    The second divides the time that the steps took in the measured run, which varies less on a shared machine."""
    mtbf, every = intervals_to_sweep(costs)
    steps = round(FAILURES * mtbf / costs.step.value)
    progress = meter(f"{name}: save intervals", REPEATS * len(every))
    clock, own = np.zeros((2, REPEATS, len(every)))
    for repeat in range(REPEATS):
        failures = kill_schedule(mtbf / costs.step.value, steps, options.seed + repeat)  # for all intervals
        for place in np.roll(np.arange(len(every)), repeat).tolist():  # no interval is always the first
            config = run_config(name, failures=failures, steps=steps, save_every=every[place])
            cost = cost_breakdown(history_of(config, options.out))
            lasted = cost.wall - cost.seconds["startup"] - cost.seconds["closing"]
            clock[repeat, place] = steps * costs.step.value / lasted
            own[repeat, place] = (cost.seconds["compute"] + cost.seconds["data"]) / lasted
            progress(1)
    return [Sweep(name, "real", mtbf, every, clock), Sweep(name, "real, of its own time", mtbf, every, own)]


def kill_schedule(mean_gap: float, steps: int, seed: int) -> tuple[Failure, ...]:
    """Return failures that kill a worker at random steps below `steps`, with `mean_gap` steps between them on average."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(mean_gap, 1000)).astype(int)
    unique = sorted({int(step) for step in at if 1 <= step < steps})
    return tuple(Failure(step=step, kind="kill", targets=(KILLED,)) for step in unique)
