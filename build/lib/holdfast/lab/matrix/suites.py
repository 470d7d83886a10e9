"""The runs of a recovery matrix: every suite with every recovery method and seed, and the config of each run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import xxhash

from holdfast import __version__
from holdfast.faults.schedule import ENDING, Schedule
from holdfast.lab.matrix.config import VARIANTS, Matrix, Variant
from holdfast.lab.matrix.models_and_data import PreparedData
from holdfast.runs.config import RunConfig

SCRIPT = Path(__file__).with_name("train.py")
SPARE_RESTARTS = 3  # beyond those of the schedule, so that an unplanned failure does not end a matrix


@dataclass(frozen=True, slots=True)
class Suite:
    """A data set, model and failure schedule, to be run with every variant (recovery method) and seed."""

    dataset: str
    model: str
    failures: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        swept = [f"{key}={_word(value)}" for key, value in self.settings]
        return "-".join([self.dataset, self.model, self.failures, *swept])

    @property
    def axes(self) -> dict[str, str]:
        """The values that distinguish this suite: data set, model, failure schedule and varied settings."""
        plain = {"dataset": self.dataset, "model": self.model, "failures": self.failures}
        return plain | {key: _word(value) for key, value in self.settings}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the matrix: a suite in one variant (recovery method) with one seed."""

    suite: Suite
    variant: str
    seed: int

    @property
    def how(self) -> Variant:
        return VARIANTS[self.variant]

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.seed}"


def all_suites(matrix: Matrix) -> list[Suite]:
    """Return every combination of data set, model, failure schedule and swept settings, in the order of the file."""
    axes = [[(key, value) for value in values] for key, values in matrix.sweep.items()]
    return [
        Suite(dataset, model, failures, tuple(settings))
        for dataset, model, failures, *settings in product(matrix.datasets, matrix.models, matrix.failures, *axes)
    ]


def planned_runs(matrix: Matrix, chosen: Sequence[Suite]) -> Iterator[PlannedRun]:
    """Yield all runs of the suites `chosen`.

    Runs that are compared with each other come one after another, because the speed of a machine may change over
    time."""
    for seed, suite, variant in product(matrix.seeds, chosen, matrix.variants):
        yield PlannedRun(suite, variant, seed)


def failure_schedule(matrix: Matrix, unit: PlannedRun) -> Schedule:
    return matrix.failures[unit.suite.failures] if unit.how.fails else ()


def expected_restarts(matrix: Matrix, unit: PlannedRun) -> int:
    """Return how many restarts a run should have: one for each step with a failure that needs a restart."""
    fatal = ("enospc",) if unit.how.is_live else (*ENDING, "enospc")
    return len({failure.step for failure in failure_schedule(matrix, unit) if failure.kind in fatal})


def run_config(matrix: Matrix, unit: PlannedRun, data: PreparedData, checkpoints: str | None) -> RunConfig:
    """Return the config of the planned run `unit`.

    `checkpoints` is a path or URL for snapshots (None: in the run's folder)."""
    settings = dict(unit.suite.settings)
    arguments = {
        "data": data.folder.resolve(),
        "model": unit.suite.model,
        "optimizer": matrix.optimizer,
        "classes": data.classes,
        "batch": matrix.batch,
        "steps": matrix.steps,
    }
    save_every = settings.get("save_every", matrix.save_every)
    return RunConfig(
        script=str(SCRIPT),
        args=tuple(word for key, value in arguments.items() for word in (f"--{key}", str(value))),
        workers=matrix.workers,
        recovery=unit.how.recovery,
        writer=unit.how.writer,
        save_every=save_every,
        max_inflight=settings.get("max_inflight", matrix.max_inflight),
        keep_last=matrix.steps // save_every + 2,
        max_restarts=len(matrix.failures[unit.suite.failures]) + SPARE_RESTARTS,
        seed=unit.seed,
        failures=failure_schedule(matrix, unit),
        workers_after=settings.get("workers_after", ()) if unit.how.fails else (),
        checkpoints=checkpoints,
    )


def config_digest(config: RunConfig) -> str:
    """Return a digest of a run's config and the version of holdfast; the paths of the run do not affect the digest."""
    fields: Mapping[str, Any] = {**config.to_json(), "script": SCRIPT.name, "checkpoints": None}
    data = fields["args"].index("--data") + 1
    args = [Path(word).name if place == data else word for place, word in enumerate(fields["args"])]
    return xxhash.xxh3_128_hexdigest(json.dumps({**fields, "args": args, "holdfast": __version__}).encode())


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).split("://", 1)[0]
