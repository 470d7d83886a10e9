"""What an experiment is: a name, where its figure was published, and a function from options to a result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from holdfast.errors import BadInput
from holdfast.lab.result import Result
from holdfast.lab.simulate.lanes import Done
from holdfast.lab.simulate.process_pool import Item, Outcome, ParallelMap, Report, map_in_processes
from holdfast.workloads.workload import Workload

Progress: TypeAlias = Callable[[int], None]
Meter: TypeAlias = Callable[[str, int], Progress]
"""From what is being done and how much of it there is, to a function that is told how much more is done."""


def per_trial(progress: Progress) -> Done:
    """One step of progress for each trial that is done."""
    return lambda trial, count: progress(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose; `trials` None means as many as the experiment wants, no panels means all of them.

    `workload` is a model of the user's own, which is measured instead of panels. Trials are run in so many processes
    (`jobs`) of this machine, or `elsewhere`.
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
    elsewhere: ParallelMap | None = None
    config: Path | None = None

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise BadInput(f"--trials {self.trials} measures nothing: give 1 or more")
        if self.jobs < 1:
            raise BadInput(f"--jobs {self.jobs} does nothing: give 1 or more")
        if self.interval < 1:
            raise BadInput(f"--interval {self.interval} saves nothing: give 1 or more")
        if self.seed < 0:
            raise BadInput(f"--seed {self.seed} is negative: give 0 or more")

    @property
    def at_once(self) -> int:
        """How many groups of trials can be run at once."""
        return self.jobs if self.elsewhere is None else self.elsewhere.jobs

    def share_out(self, work: Callable[[Item, Report], Outcome], items: Sequence[Item], hear: Report) -> list[Outcome]:
        """Call work with every item, in processes of this machine or elsewhere."""
        if self.elsewhere is not None:
            return self.elsewhere(work, items, hear)
        return map_in_processes(work, items, jobs=self.jobs, hear=hear)

    def count(self, full: int, quick: int) -> int:
        """How many trials to run: what the user asked for, else the experiment's own full or quick number."""
        return self.trials or (quick if self.quick else full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment that `holdfast lab run` knows.

    `own` says whether it also measures a workload of the user's own, and runs trials on a cluster.
    """

    name: str
    title: str
    source: str
    panels: bool = False  # whether it is made of panels that can be chosen
    own: bool = False
    configured: bool = False  # whether a file says what it is made of
    run: Callable[[Options, Meter], Result]
