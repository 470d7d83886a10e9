"""All runs of a matrix, one after the other, on the disk: what is done stays done, and what was interrupted is done anew.

<out>/data/<data set>/            its images as arrays
<out>/runs/<suite>/<run>/         the folder of a `holdfast run`; its snapshots go once they are compared
<out>/runs/<suite>/<run>.log      what its supervisor said
<out>/runs/<suite>/<run>.json     what was measured: with this file the run is done

How much of a virtual machine's processors its host gave to others: runs are compared by the clock, and this spoils it.
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
from rich.console import Console

from holdfast.checkpoint.place import store_at
from holdfast.errors import HoldfastError, StorageFailed
from holdfast.lab.experiment import Meter
from holdfast.lab.matrix.config import REFERENCE, Matrix
from holdfast.lab.matrix.measured_run import Distances, MeasuredRun, distances, measure, read_measured
from holdfast.lab.matrix.models_and_data import PreparedData, prepare_dataset
from holdfast.lab.matrix.suites import PlannedRun, Suite, config_digest, planned_runs, run_config
from holdfast.report.files import replace_text
from holdfast.runs.config import RunConfig
from holdfast.supervise.child_call import ChildCall
from holdfast.supervise.preload import warm
from holdfast.supervise.supervisor import supervise
from holdfast.supervise.verdict import RunVerdict

STATISTICS = Path("/proc/stat")


class ProcessorTicks(NamedTuple):
    """What the kernel has counted since it started, in ticks of all processors."""

    stolen: int
    total: int


def processor_ticks(statistics: Path = STATISTICS) -> ProcessorTicks | None:
    """What is counted now; nothing where the system does not say."""
    try:
        # Guests' time, which follows these eight, is counted among them already.
        kind, *counts = statistics.read_text().split("\n", 1)[0].split()[:9]
        numbers = [int(each) for each in counts]
    except (OSError, ValueError):
        return None
    return ProcessorTicks(numbers[7], sum(numbers)) if kind == "cpu" and len(numbers) == 8 else None


def stolen_share(before: ProcessorTicks | None, after: ProcessorTicks | None) -> float | None:
    """The part of all processors' time between two counts that others had; nothing if that is not known."""
    if before is None or after is None or after.total <= before.total:
        return None
    return (after.stolen - before.stolen) / (after.total - before.total)


MEMORY = Path("/dev/shm")
STOLEN = 0.1  # of the processors' time: a run from which others took more is done again
PAUSES = (5.0, 20.0, 40.0)  # seconds before each further try of it, since a host is busy for a while at a time
WITHIN = 600.0  # seconds for the snapshots of one run to be read, or to be removed from an object store


@dataclass(frozen=True, slots=True)
class MatrixRunner:
    """The runs of these suites of a matrix, below a folder, on data that is ready."""

    matrix: Matrix
    suites: Sequence[Suite]
    out: Path
    data: dict[str, PreparedData]

    @classmethod
    def of(cls, matrix: Matrix, suites: Sequence[Suite], out: Path, data: Path | None) -> "MatrixRunner":
        """The runs, once every data set is at hand and every config makes sense: before the first one is started."""
        names = dict.fromkeys(suite.dataset for suite in suites)
        runs = cls(matrix, suites, out, {name: prepare_dataset(name, data, out / "data") for name in names})
        for unit in runs.units:
            runs.config(unit).check_world(1)
        return runs

    @property
    def units(self) -> list[PlannedRun]:
        """Every run, in the order in which they are done."""
        return list(planned_runs(self.matrix, list(self.suites)))

    def folder(self, unit: PlannedRun) -> Path:
        """The folder of a run."""
        return self.out / "runs" / unit.suite.name / unit.name

    def config(self, unit: PlannedRun) -> RunConfig:
        """What `holdfast run` is to do."""
        return run_config(self.matrix, unit, self.data[unit.suite.dataset], self._place(unit))

    def done(self, unit: PlannedRun) -> MeasuredRun | None:
        """What was measured of a run that is done: completed, and of the same config."""
        found = read_measured(self._record(unit))
        if found is None or found.verdict != "completed" or found.digest != config_digest(self.config(unit)):
            return None
        return found

    def all(self, meter: Meter) -> dict[PlannedRun, MeasuredRun]:
        """Every run, done now if it was not before; a request to stop ends it between two runs or within one."""
        progress = meter("runs", len(self.units))
        found: dict[PlannedRun, MeasuredRun] = {}
        warm()  # now, or the first run would pay for the others
        try:
            for unit in self.units:
                found[unit] = self.done(unit) or self._do(unit)
                if unit.variant == self.matrix.variants[-1]:
                    self._discard_all(unit)
                progress(1)
        finally:
            shutil.rmtree(self._memory, ignore_errors=True)  # what is interrupted begins anew
        return found

    def _do(self, unit: PlannedRun) -> MeasuredRun:
        """Train one run from its beginning, measure it, and put that on record."""
        folder = self.folder(unit)
        found = self._undisturbed(unit)
        reference = self.folder(PlannedRun(unit.suite, REFERENCE, unit.seed))
        if unit.variant != REFERENCE:
            found = replace(found, distances=_compared(folder, reference))
            self._discard(unit)
        replace_text(self._record(unit), json.dumps(found.to_json()) + "\n")
        return found

    def _undisturbed(self, unit: PlannedRun) -> MeasuredRun:
        """A run, done again if others had the processors meanwhile; one that failed stays, or its failure would be lost."""
        found = replace(self._measured(unit), tries=1)
        for pause in PAUSES:
            is_sound = found.verdict == "completed" and found.audit == "pass"
            if not is_sound or found.stolen is None or found.stolen <= STOLEN:
                break
            time.sleep(pause)
            found = replace(self._measured(unit), tries=found.tries + 1)
        return found

    def _measured(self, unit: PlannedRun) -> MeasuredRun:
        """Train one run from its beginning, and measure it."""
        folder, config = self.folder(unit), self.config(unit)
        self._discard(unit)
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        before = processor_ticks()
        verdict = self._supervised(config, folder)
        taken = stolen_share(before, processor_ticks())
        return replace(measure(unit, config_digest(config), verdict, folder), stolen=taken)

    def _supervised(self, config: RunConfig, folder: Path) -> RunVerdict:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("w") as log:
            verdict = supervise(config, folder, console=Console(file=log, width=160))
        if verdict.verdict == "preempted":
            raise KeyboardInterrupt  # somebody wants to end the matrix, not this run
        return verdict

    def _discard_all(self, last: PlannedRun) -> None:
        """All variants of a suite and a seed are done: nothing is compared with the reference any more."""
        for variant in self.matrix.variants:
            self._discard(PlannedRun(last.suite, variant, last.seed))

    def _discard(self, unit: PlannedRun) -> None:
        """Remove the snapshots of a run, wherever they are; what a store refuses to remove does no harm."""
        shutil.rmtree(self.folder(unit) / "checkpoints", ignore_errors=True)
        place = self._place(unit)
        if place is None:
            return
        if "://" not in place:
            shutil.rmtree(place, ignore_errors=True)
            return
        with suppress(HoldfastError):
            ChildCall(lambda: _emptied(place), place).result(WITHIN)

    def _record(self, unit: PlannedRun) -> Path:
        return self.folder(unit).with_suffix(".json")

    def _place(self, unit: PlannedRun) -> str | None:
        """Where a run saves: in its own folder, or at a place of its own below the one that the suite names."""
        place = dict(unit.suite.settings).get("checkpoints", "directory")
        if place == "directory":
            return None
        below = f"{unit.suite.name}/{unit.name}"
        if place != "tmpfs":
            return f"{place.rstrip('/')}/{below}"
        if not MEMORY.is_dir():
            raise StorageFailed(f"there is no file system in memory at {MEMORY}: leave out tmpfs")
        return str(self._memory / below)

    @property
    def _memory(self) -> Path:
        """Where in memory the runs of this folder save; another folder's save elsewhere."""
        return MEMORY / f"holdfast-{xxhash.xxh3_64_hexdigest(str(self.out.resolve()).encode())}"


def _compared(folder: Path, reference: Path) -> Distances | None:
    """How far the models of two runs are apart, by their snapshots; None if that cannot be told.

    In a process of its own: this one forks workers, and must start no threads, as a client of an object store does.
    """
    found: Any = None
    with suppress(HoldfastError):
        found = ChildCall(lambda: distances(folder, reference), str(folder)).result(WITHIN)
    return None if found is None else tuple((int(step), float(apart), float(size)) for step, apart, size in found)


def _emptied(place: str) -> None:
    store = store_at(place)
    for name in store.names():
        store.remove(name)
