"""The interface of an experiment: its description, its options, and the log of trials from which it resumes."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from holdfast.errors import BadInput, StorageFailed
from holdfast.lab.result import Result
from holdfast.lab.simulate.lanes import TrialDone
from holdfast.lab.simulate.pools import Item, Outcome, RayPool, Report, map_in_processes
from holdfast.workloads.workload import Workload

Progress: TypeAlias = Callable[[int], None]
Meter: TypeAlias = Callable[[str, int], Progress]
"""A function that starts a progress bar with a label and a total, and returns the function that advances it."""


Named = TypeVar("Named")


def chosen(names: Sequence[str], known: Mapping[str, Named], noun: str) -> list[Named]:
    """Return the values of `known` whose keys are in `names`, or all values if `names` is empty.

    An unknown name raises BadInput. `noun` says in its message what the names are, such as "panel"."""
    if unknown := [name for name in names if name not in known]:
        raise BadInput(f"there is no {noun} {unknown[0]!r}; choose among {', '.join(known)}.")
    return [value for name, value in known.items() if not names or name in names]


def per_trial(progress: Progress) -> TrialDone:
    return lambda trial, count: progress(1)


class TrialLog:
    """An append-only file of measured numbers by key, so that a repeated experiment can reuse them.

    `code` is a digest of the code that computes the numbers; entries written by other code are not used."""

    def __init__(self, path: Path, code: str) -> None:
        self._path, self._code, self.known, self.outdated = path, code, dict[str, float](), 0
        self.reused = set[str]()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageFailed(
                f"cannot write to {path.parent}: {error.strerror}; name another folder with --out."
            ) from error
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            with suppress(ValueError, TypeError):  # a line that was torn by a kill
                digest, key, value = json.loads(line)
                if digest == code:
                    self.known[str(key)] = float("inf") if value is None else float(value)
                else:
                    self.outdated += 1
        self._earlier = frozenset(self.known)
        try:
            self._file = path.open("ab", buffering=0)  # nothing stays in a buffer that could fail to be written later
            self._file.write(b"\n")  # ends a line that was torn by a kill
        except OSError as error:
            raise StorageFailed(f"cannot write {path}: {error.strerror}; name another --out.") from error

    def get(self, key: str) -> float | None:
        self.reused |= {key} & self._earlier
        return self.known.get(key)

    def record(self, key: str, value: float) -> None:
        """Append `value` under `key`, unless the log already has this key."""
        if self.get(key) is not None:
            return
        self.known[key] = value
        line = json.dumps([self._code, key, value if np.isfinite(value) else None])
        try:
            self._file.write(f"{line}\n".encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {self._path}: {error.strerror}; free space and run again.") from error

    @property
    def remarks(self) -> list[str]:
        """Sentences for the report: how many measurements are reused from earlier runs, and how many are outdated."""
        place, lines = f"{self._path.parent.name}/{self._path.name}", []
        if self.reused:
            lines.append(
                f"{len(self.reused)} measurements in {place} are reused from an earlier run with the same code; delete the "
                "file to measure them again."
            )
        if self.outdated:
            lines.append(
                f"{self.outdated} earlier measurements in {place} are not used, because the code of the model or of holdfast "
                "has changed since."
            )
        return lines

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command `holdfast lab run`."""

    seed: int = 0
    trials: int | None = None  # None: the experiment chooses the number
    jobs: int = 1
    quick: bool = False
    data: Path | None = None
    out: Path = Path("results")
    panels: tuple[str, ...] = ()  # pairs of a model and a data set; none means all
    interval: int = 8  # iterations between two full checkpoints
    workload: Workload | None = None  # a model of the user, measured instead of panels
    cluster: RayPool | None = None  # where trials run instead of in `jobs` local processes
    config: Path | None = None
    policies: tuple[str, ...] = ()  # files with checkpoint policies of the user
    logs: list[TrialLog] = field(default_factory=list)  # of finished trials that the experiment has opened

    def __post_init__(self) -> None:
        for name in ("trials", "jobs", "interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"--{name} must be 1 or more (got {value}).")
        if self.seed < 0:
            raise BadInput(f"--seed must be 0 or more (got {self.seed}).")

    def open_log(self, name: str, code: str) -> TrialLog:
        """Open the log of trials called `name` in the result folder.

        `code` is a digest of the code that runs the trials."""
        self.logs.append(TrialLog(self.out / "trials" / f"{name}.jsonl", code))
        return self.logs[-1]

    @property
    def parallelism(self) -> int:
        return self.jobs if self.cluster is None else self.cluster.jobs

    def map(self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], on_report: Report) -> list[Outcome]:
        """Call `work(item, report)` for each item in parallel, and return the outcomes in the order of the items.

        When `work` calls `report`, `on_report` is called in this process with the same arguments."""
        if self.cluster is not None:
            return self.cluster(work, items, on_report)
        return map_in_processes(work, items, jobs=self.jobs, on_report=on_report)

    def trial_count(self, full: int, quick: int) -> int:
        """Return the value of `--trials`; without this option, return `quick` for a quick run, otherwise `full`."""
        return self.trials or (quick if self.quick else full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment for `holdfast lab run`: its description, the options it accepts, and the function that runs it."""

    name: str
    title: str
    source: str
    has_panels: bool = False  # accepts --panel
    accepts_workload: bool = False  # accepts --workload and --on
    accepts_config: bool = False  # accepts --config
    accepts_policy: bool = False  # accepts --policy
    run: Callable[[Options, Meter], Result]

    def measure(self, options: Options, meter: Meter) -> Result:
        """Run the experiment and return its result, with remarks on the trials that were reused from earlier runs."""
        return with_reuse(self.run(options, meter), options)


def with_reuse(result: Result, options: Options) -> Result:
    """Return `result` with added remarks on the trials that were reused from earlier runs."""
    reused = [line for log in options.logs for line in log.remarks]
    return replace(result, remarks=[*result.remarks, *dict.fromkeys(reused)])
