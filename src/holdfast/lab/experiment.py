"""The interface of an experiment: its name, the published figure it reproduces, and the function that runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from holdfast.errors import BadInput
from holdfast.lab.result import Result
from holdfast.lab.simulate.lanes import TrialDone
from holdfast.lab.simulate.process_pool import Item, Outcome, ParallelMap, Report, map_in_processes
from holdfast.lab.trial_log import TrialLog
from holdfast.workloads.workload import Workload

Progress: TypeAlias = Callable[[int], None]
Meter: TypeAlias = Callable[[str, int], Progress]
"""A function that starts a progress bar with a label and a total, and returns the function that advances it."""


def per_trial(progress: Progress) -> TrialDone:
    """Return a callback that advances `progress` by one for each finished trial."""
    return lambda trial, count: progress(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `holdfast lab run`.

    If `trials` is None, the experiment chooses the number. `panels` names pairs of a model and a data set; if it is
    empty, all pairs run. If `workload` is given, this model of the user is measured instead of the panels. `interval`
    is the number of iterations between full checkpoints. Trials run in `jobs` local processes, or on `cluster`.
    `policies` are files with checkpoint policies of the user. `logs` are the logs of finished trials that the experiment has opened.
    """

    seed: int = 0
    trials: int | None = None
    jobs: int = 1
    quick: bool = False
    data: Path | None = None
    out: Path = Path("results")
    panels: tuple[str, ...] = ()
    interval: int = 8
    workload: Workload | None = None
    cluster: ParallelMap | None = None
    config: Path | None = None
    policies: tuple[str, ...] = ()
    logs: list[TrialLog] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("trials", "jobs", "interval"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"--{name} must be 1 or more (got {value}).")
        if self.seed < 0:
            raise BadInput(f"--seed must be 0 or more (got {self.seed}).")

    def open_log(self, name: str, code: str) -> TrialLog:
        """Open the log of finished trials called `name` in the folder of the result; `code` is as in `TrialLog`."""
        self.logs.append(TrialLog(self.out / "trials" / f"{name}.jsonl", code))
        return self.logs[-1]

    @property
    def parallelism(self) -> int:
        """The number of processes that can run trials at once."""
        return self.jobs if self.cluster is None else self.cluster.jobs

    def map(self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], on_report: Report) -> list[Outcome]:
        """Return the outcome of `work` for each of `items`, computed in local processes or on the cluster.

        While it runs, `work` may report progress to its second argument; the reports are passed to `on_report`."""
        if self.cluster is not None:
            return self.cluster(work, items, on_report)
        return map_in_processes(work, items, jobs=self.jobs, on_report=on_report)

    def trial_count(self, full: int, quick: int) -> int:
        """Return the number of trials that the user chose, or else the experiment's `quick` or `full` number."""
        return self.trials or (quick if self.quick else full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment of `holdfast lab run`: its description, the options it accepts, and the function that runs it."""

    name: str
    title: str
    source: str
    has_panels: bool = False  # accepts --panel
    accepts_workload: bool = False  # accepts --workload and --on
    accepts_config: bool = False  # accepts --config
    accepts_policy: bool = False  # accepts --policy
    run: Callable[[Options, Meter], Result]

    def measure(self, options: Options, meter: Meter) -> Result:
        """Run the experiment; the remarks of its result also say which trials of earlier runs were reused."""
        return with_reuse(self.run(options, meter), options)


def with_reuse(result: Result, options: Options) -> Result:
    """Return `result` with remarks on the trials that were reused from the logs of an earlier run."""
    reused = [line for log in options.logs for line in log.remarks]
    return replace(result, remarks=[*result.remarks, *dict.fromkeys(reused)])
