"""Failures of real training: predicted from a run in which nothing failed, then struck in others and read from their histories."""

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
# Where kills strike: far enough from each other for a replacement to be there.
EARLIER, LATER = (70, 120), (190, 260)
POINTS = ("boundary", "forward", "backward=0.3", "backward=0.5", "backward=0.8", "optimizer")
KILLED = WORKERS - 1  # in a sweep
Do = Callable[["RunConfig", Path], str]


@dataclass(frozen=True, slots=True, eq=False)
class ObservedRuns:
    """What real runs showed: cases, and what each calm run cost."""

    cases: list[AdviceCase]
    calm: dict[str, RunCosts]
    restarts: dict[str, list[float]]  # seconds of the restarts that were struck, by workload


def run_and_kill(options: Options, meter: Meter) -> ObservedRuns:
    """A calm run of each workload, and one with kills under every recovery."""
    from holdfast.lab.advice_check.run_driver import start_driver

    names = list(WIDTHS)[:1] if options.quick else list(WIDTHS)
    progress = meter("runs that are killed", len(names) * (1 + len(RECOVERIES)))
    found = ObservedRuns([], {}, {})
    with TemporaryDirectory(dir=options.out, ignore_cleanup_errors=True) as folder:
        place = Path(folder).absolute()
        with start_driver(options.out / "runs.log") as do:
            for name in names:
                history = run_to_completion(do, run_config(name), place / f"{name}-calm")
                found.calm[name] = costs = run_costs(history)
                progress(1)
                predicted = prices(costs, Question())
                for recovery in RECOVERIES:
                    history = run_to_completion(
                        do, run_config(name, recovery, scheduled_kills(options.seed)), place / f"{name}-{recovery}"
                    )
                    found.cases.extend(_cases(name, costs, predicted[recovery], history))
                    if recovery == "restart":
                        seconds = map(restart_seconds, cost_breakdown(history).failures)
                        found.restarts[name] = [each for each in seconds if each is not None]
                    progress(1)
    return found


def scheduled_kills(seed: int) -> tuple[Failure, ...]:
    """What strikes every struck run: two kills of a worker, at moments that no save knows of."""
    rng = np.random.default_rng((seed, 1))
    return tuple(
        Failure(
            step=int(rng.integers(*within)),
            kind="kill",
            point=str(rng.choice(POINTS)),
            targets=(int(rng.integers(1, WORKERS)),),
        )
        for within in (EARLIER, LATER)
    )


def run_config(
    name: str,
    recovery: str = "restart",
    failures: tuple[Failure, ...] = (),
    *,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
) -> "RunConfig":
    """How a run of a workload is done."""
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


def run_to_completion(do: Do, config: "RunConfig", folder: Path) -> Sequence[Event]:
    """The history of a run that is done now."""
    verdict = do(config, folder)
    if verdict != "completed":
        raise WorkerLost(f"the run {folder.name} was not completed: {verdict}")
    return read_history(folder).events


def _cases(name: str, costs: RunCosts, price: Price, history: Sequence[Event]) -> list[AdviceCase]:
    """Seconds and iterations of every kill of a run."""
    found = []
    for failure, seconds in recoveries(cost_breakdown(history), history, costs.step.value):
        work = failure.rework_steps + failure.samples_lost / costs.batch
        where = f"killed in step {failure.step}"
        found += [
            AdviceCase(name, where, price.recovery, "seconds", price.seconds, seconds + failure.rework),
            AdviceCase(name, where, price.recovery, "iterations", price.iterations, work),
        ]
    return found
