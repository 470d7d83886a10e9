"""Execute the runs of a recovery matrix one after another; finished runs are kept, interrupted ones start again.

<out>/data/<data set>/            the images of a data set as arrays
<out>/runs/<suite>/<run>/         the folder of a `holdfast run`; snapshots are removed once they are compared
<out>/runs/<suite>/<run>.log      the output of the supervisor
<out>/runs/<suite>/<run>.json     the measurements; a run with this file is finished

Runs are compared by wall-clock time. So a run is repeated if the host of a virtual machine gave much CPU time to others
during the run.
"""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast.checkpoint.place import store_at
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.lab.experiment import Meter
from holdfast.lab.matrix.config import REFERENCE, Matrix
from holdfast.lab.matrix.measured_run import Distances, MeasuredRun, distances, measure, read_measured
from holdfast.lab.matrix.models_and_data import PreparedData, prepare_dataset
from holdfast.lab.matrix.suites import PlannedRun, Suite, config_digest, planned_runs, run_config
from holdfast.lab.supervised_run import execute
from holdfast.report.files import replace_text
from holdfast.runs.config import RunConfig
from holdfast.supervise.child_call import ChildCall
from holdfast.supervise.preload import warm

STATISTICS = Path("/proc/stat")
MEMORY = Path("/dev/shm")
STOLEN = 0.1  # share of CPU time: a run that lost more to the host is repeated
PAUSES = (5.0, 20.0, 40.0)  # seconds before each further try, because a host stays busy for a while
WITHIN = 600.0  # seconds to read the snapshots of one run, or to remove them from an object store


class ProcessorTicks(NamedTuple):
    """The clock ticks of all CPUs since boot; `stolen` ticks went to other virtual machines on the host."""

    stolen: int
    total: int


def processor_ticks(statistics: Path = STATISTICS) -> ProcessorTicks | None:
    """Return the current ticks from /proc/stat, or None where the system does not report them."""
    try:
        # The time of guests, which follows these eight counts, is already part of them.
        kind, *counts = statistics.read_text().split("\n", 1)[0].split()[:9]
        numbers = [int(count) for count in counts]
    except (OSError, ValueError):
        return None
    return ProcessorTicks(numbers[7], sum(numbers)) if kind == "cpu" and len(numbers) == 8 else None


def stolen_share(before: ProcessorTicks | None, after: ProcessorTicks | None) -> float | None:
    """Return the fraction of CPU time that went to other virtual machines between two readings; None if unknown."""
    if before is None or after is None or after.total <= before.total:
        return None
    return (after.stolen - before.stolen) / (after.total - before.total)


@dataclass(frozen=True, slots=True)
class MatrixRunner:
    """An executor for the runs of the given suites, which stores the runs below the folder `out`."""

    matrix: Matrix
    suites: Sequence[Suite]
    out: Path
    data: dict[str, PreparedData]

    @classmethod
    def prepared(cls, matrix: Matrix, suites: Sequence[Suite], out: Path, data: Path | None) -> "MatrixRunner":
        """Return a runner, after loading every data set and checking the config of every run."""
        names = dict.fromkeys(suite.dataset for suite in suites)
        runner = cls(matrix, suites, out, {name: prepare_dataset(name, data, out / "data") for name in names})
        for planned in runner.planned:
            runner.config(planned).check_world(1)
        return runner

    @property
    def planned(self) -> list[PlannedRun]:
        return list(planned_runs(self.matrix, self.suites))

    def folder(self, planned: PlannedRun) -> Path:
        return self.out / "runs" / planned.suite.name / planned.name

    def config(self, planned: PlannedRun) -> RunConfig:
        return run_config(self.matrix, planned, self.data[planned.suite.dataset], self._checkpoints(planned))

    def finished(self, planned: PlannedRun) -> MeasuredRun | None:
        """Return the measurements of an earlier execution of `planned`.

        Return None if there is none that completed, or if the config of the run has changed since."""
        run = read_measured(self._record(planned))
        if run is None or run.verdict != "completed" or run.digest != config_digest(self.config(planned)):
            return None
        return run

    def run_all(self, meter: Meter) -> dict[PlannedRun, MeasuredRun]:
        """Execute all runs that are not finished, and return the measurements of all runs."""
        progress = meter("runs", len(self.planned))
        runs: dict[PlannedRun, MeasuredRun] = {}
        warm()  # otherwise only the first run would pay for the imports
        try:
            for planned in self.planned:
                run = self.finished(planned)
                if run is None:
                    run = self._undisturbed(planned)
                    if planned.variant != REFERENCE:
                        run = replace(run, distances=self._distances(planned))
                        self._remove_snapshots(planned)
                    replace_text(self._record(planned), json.dumps(run.to_json()) + "\n")
                runs[planned] = run
                if planned.variant == self.matrix.variants[-1]:  # nothing is compared with the reference any more
                    for variant in self.matrix.variants:
                        self._remove_snapshots(PlannedRun(planned.suite, variant, planned.seed))
                progress(1)
        finally:
            shutil.rmtree(self._memory, ignore_errors=True)  # an interrupted run starts again
        return runs

    def _undisturbed(self, planned: PlannedRun) -> MeasuredRun:
        """Execute a run; repeat it after a pause if other virtual machines took much of its CPU time."""
        run = replace(self._measured(planned), tries=1)
        for pause in PAUSES:
            is_sound = run.verdict == "completed" and run.audit == "pass"
            if not is_sound or run.stolen is None or run.stolen <= STOLEN:
                break
            time.sleep(pause)
            run = replace(self._measured(planned), tries=run.tries + 1)
        return run

    def _measured(self, planned: PlannedRun) -> MeasuredRun:
        folder, config = self.folder(planned), self.config(planned)
        self._remove_snapshots(planned)
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        log = folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        before = processor_ticks()
        verdict = execute(config, folder, log)
        share = stolen_share(before, processor_ticks())
        return replace(measure(planned, config_digest(config), verdict, folder), stolen=share)

    def _distances(self, planned: PlannedRun) -> Distances | None:
        """Return the distances between the models of a run and of the same run without failures; None if unknown.

        A child process compares them, because storage clients start threads, and a process with threads cannot fork
        safely."""
        answer: Any = None
        folder = self.folder(planned)
        reference = self.folder(PlannedRun(planned.suite, REFERENCE, planned.seed))
        with suppress(HoldfastError):
            answer = ChildCall(lambda: distances(folder, reference), str(folder)).result(WITHIN)
        return None if answer is None else tuple((int(step), float(apart), float(norm)) for step, apart, norm in answer)

    def _remove_snapshots(self, planned: PlannedRun) -> None:
        """Remove the snapshots of a run; ignore errors of the storage."""
        shutil.rmtree(self.folder(planned) / "checkpoints", ignore_errors=True)
        place = self._checkpoints(planned)
        if place is None:
            return
        if "://" not in place:
            shutil.rmtree(place, ignore_errors=True)
            return

        def empty() -> None:
            store = store_at(place)
            for name in store.names():
                store.remove(name)

        with suppress(HoldfastError):
            ChildCall(empty, place).result(WITHIN)

    def _record(self, planned: PlannedRun) -> Path:
        return self.folder(planned).with_suffix(".json")

    def _checkpoints(self, planned: PlannedRun) -> str | None:
        place = dict(planned.suite.settings).get("checkpoints", "directory")
        if place == "directory":
            return None
        below = f"{planned.suite.name}/{planned.name}"
        if place != "tmpfs":
            return f"{place.rstrip('/')}/{below}"
        if not MEMORY.is_dir():
            raise StorageFailed(f"there is no file system in memory at {MEMORY}: leave out tmpfs.")
        return str(self._memory / below)

    @property
    def _memory(self) -> Path:
        return MEMORY / f"holdfast-{xxhash.xxh3_64_hexdigest(str(self.out.resolve()).encode())}"
