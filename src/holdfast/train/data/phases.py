"""The phases of a run: what each of its loops trains, in the order in which the script made them.

Most scripts have one loop, and their runs one phase.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.sampler.plan import SamplePlan
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.data.loader import Loaded, ShareLoader, load
from holdfast.train.data.requests import LoadRequests, RecordOrder, requests


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingPhase:
    """One loop of a script: the plan of its samples, and how they are loaded. If `by_epoch`, it yields epochs."""

    plan: SamplePlan
    loads: ShareLoader
    options: Mapping[str, Any]
    by_epoch: bool


class Phases:
    """The phases of a run, one after another, and the plan of the whole run."""

    def __init__(self, phases: Sequence[TrainingPhase]) -> None:
        self._phases = tuple(phases)
        self.plan = RunPlan(tuple(phase.plan for phase in phases))

    def __len__(self) -> int:
        return len(self._phases)

    def __getitem__(self, index: int) -> TrainingPhase:
        return self._phases[index]

    def seam_after(self, step: int) -> int:
        """Return the next step before which the script runs code of its own, after an epoch or a phase."""
        plan = self.plan
        index = plan.index(step)
        phase, local = plan.phase(step)
        end = phase.end_of(phase.position(local).epoch) if self[index].by_epoch else phase.steps
        return plan.first_steps[index] + end

    def is_seam(self, step: int) -> bool:
        """Return True if the script runs code of its own before `step`: after an epoch or a phase."""
        return step > 0 and self.seam_after(step - 1) == step


class SampleSource:
    """An iterator over this rank's loaded samples, step by step. `divide` changes the rank and the world size."""

    def __init__(self, phases: Phases, record: RecordOrder | None = None) -> None:
        self._phases, self._plan, self._record = phases, phases.plan, record
        self._wanted = LoadRequests(iter(()))
        self._loaded: Iterator[Loaded] = iter(())

    def divide(self, start: int, rank: int, world: int) -> None:
        """Continue with step `start`, and from there load only the samples of rank `rank` among `world` ranks."""
        first, *later = range(self._plan.index(start), len(self._phases))
        loaded = self._load(first, start - self._plan.first_steps[first], rank, world)
        self._loaded = self._chained(loaded, later, rank, world) if later else loaded

    def prepare(self) -> None:
        """Compute the next load request (sample ids and seed) without loading the samples."""
        self._wanted.prepare()

    def __next__(self) -> Loaded:
        return next(self._loaded)

    def _chained(self, loaded: Iterator[Loaded], later: list[int], rank: int, world: int) -> Iterator[Loaded]:
        yield from loaded
        for index in later:
            yield from self._load(index, 0, rank, world)

    def _load(self, index: int, start: int, rank: int, world: int) -> Iterator[Loaded]:
        phase, first_epoch = self._phases[index], self._plan.first_epochs[index]
        self._wanted = LoadRequests(requests(phase.plan, start, rank, world, self._record, first_epoch))
        return load(phase.loads, self._wanted, **phase.options)
