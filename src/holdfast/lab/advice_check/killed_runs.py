"""Real training runs: one without failures, from which costs are predicted, then runs whose workers are killed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from holdfast.advice.prices import RECOVERIES, Price, prices
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts, recoveries, restart_seconds, run_costs
from holdfast.cost.breakdown import cost_breakdown
from holdfast.errors import WorkerLost
from holdfast.events import Event
from holdfast.faults.schedule import Failure
from holdfast.history.log import read_history
from holdfast.lab.advice_check.predicted_costs import AdviceCase
from holdfast.lab.experiment import Meter, Options

if TYPE_CHECKING:
    from holdfast.runs.config import RunConfig

SCRIPT = Path(__file__).with_name("train.py")
WORKERS, STEPS, SAVE_EVERY = 3, 300, 40
WIDTHS = {"small": 128, "wide": 768}  # workloads, by the width of their network
# The ranges of steps for the two kills, far enough apart for a replacement worker to have joined.
EARLIER, LATER = (70, 120), (190, 260)
POINTS = ("boundary", "forward", "backward=0.3", "backward=0.5", "backward=0.8", "optimizer")
KILLED = WORKERS - 1  # the rank that is killed in a sweep
Execute = Callable[["RunConfig", Path], str]


@dataclass(frozen=True, slots=True, eq=False)
class ObservedRuns:
    """The measurements of all runs: `cases` has the predicted and measured costs of each killed run.

    For each workload, `calm` has the costs of the run without failures, and `restarts` the seconds of each restart."""

    cases: list[AdviceCase]
    calm: dict[str, RunCosts]
    restarts: dict[str, list[float]]  # seconds of the restarts after kills, by workload


def run_and_kill(options: Options, meter: Meter) -> ObservedRuns:
    """Run each workload once without failures, and once with each recovery method and two kills."""
    from holdfast.lab.advice_check.run_driver import start_driver

    names = list(WIDTHS)[:1] if options.quick else list(WIDTHS)
    progress = meter("runs that are killed", len(names) * (1 + len(RECOVERIES)))
    kills, observed = scheduled_kills(options.seed), ObservedRuns([], {}, {})
    with (
        TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder,
        start_driver(options.out / "runs.log") as execute,
    ):
        runs = Path(folder).absolute()
        for name in names:
            history = run_to_completion(execute, run_config(name), runs / f"{name}-calm")
            observed.calm[name] = costs = run_costs(history)
            progress(1)
            predicted = prices(costs, Question())
            for recovery in RECOVERIES:
                history = run_to_completion(execute, run_config(name, recovery, kills), runs / f"{name}-{recovery}")
                observed.cases.extend(_cases(name, costs, predicted[recovery], history))
                if recovery == "restart":
                    restarts = map(restart_seconds, cost_breakdown(history).failures)
                    observed.restarts[name] = [value for value in restarts if value is not None]
                progress(1)
    return observed


def scheduled_kills(seed: int) -> tuple[Failure, ...]:
    """Return the two kills that every killed run gets: a random worker, at a random step and point of the step."""
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
    """Return the config of a run of the workload `name`, which is a key of `WIDTHS`."""
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


def run_to_completion(execute: Execute, config: "RunConfig", folder: Path) -> Sequence[Event]:
    """Execute a run in `folder` and return its events; raise WorkerLost if the run is not completed."""
    verdict = execute(config, folder)
    if verdict != "completed":
        raise WorkerLost(f"the run {folder.name} was not completed: {verdict}.")
    return read_history(folder).events


def _cases(name: str, costs: RunCosts, price: Price, history: Sequence[Event]) -> list[AdviceCase]:
    cases = []
    for failure, seconds in recoveries(cost_breakdown(history), history, costs.step.value):
        work, where = failure.rework_steps + failure.samples_lost / costs.batch, f"killed in step {failure.step}"
        cases.append(AdviceCase(name, where, price.recovery, "seconds", price.seconds, seconds + failure.rework))
        cases.append(AdviceCase(name, where, price.recovery, "iterations", price.iterations, work))
    return cases
