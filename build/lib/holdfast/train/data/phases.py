"""The phases of a run: the training loops of its script, one after another, and the samples of their steps.

Most scripts have one loop, so most runs have one phase.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.blocks.division import Ids
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import EpochOrders, Position, SamplePlan
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.data.loader import Loaded, LoadRequest, ShareLoader, load
from holdfast.train.state import rng

RecordOrder = Callable[[int, Ids], None]
CHUNK = 1 << 14  # sample ids computed together: the calls take most of the time of a few
TOGETHER = 16  # requests made together: each takes a quarter of its time alone (benchmarks/steady)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingPhase:
    """One training loop of a script: the plan of its samples, and their loader `loads`.

    If `by_epoch`, the script iterates over epochs, and over batches inside each epoch."""

    plan: SamplePlan
    loads: ShareLoader
    options: Mapping[str, Any]
    by_epoch: bool


class Phases:
    """The phases (training loops) of a run, one after another, and the plan of the whole run."""

    def __init__(self, phases: Sequence[TrainingPhase]) -> None:
        self._phases = tuple(phases)
        self.plan = RunPlan(tuple(phase.plan for phase in phases))

    def __len__(self) -> int:
        return len(self._phases)

    def __getitem__(self, index: int) -> TrainingPhase:
        return self._phases[index]

    def seam_after(self, step: int) -> int:
        """Return the first step after the epoch or phase that `step` is in. The script's own code runs before it."""
        plan = self.plan
        index = plan.index(step)
        phase, local = plan.phase(step)
        end = phase.end_of(phase.position(local).epoch) if self[index].by_epoch else phase.steps
        return plan.first_steps[index] + end

    def is_seam(self, step: int) -> bool:
        """Return True if the script runs its own code before `step`, because an epoch or phase has ended."""
        return step > 0 and self.seam_after(step - 1) == step


class SampleSource:
    """An iterator over the samples that this rank loads for each step. `divide` sets the rank and the world size."""

    def __init__(self, phases: Phases, record: RecordOrder | None = None) -> None:
        self._phases, self._plan, self._record = phases, phases.plan, record
        self._wanted = LoadRequests(iter(()))
        self._loaded: Iterator[Loaded] = iter(())

    def divide(self, start: int, rank: int, world: int) -> None:
        """Continue with step `start`. From there on, load the samples of rank `rank` among `world` ranks."""
        first, *later = range(self._plan.index(start), len(self._phases))
        loaded = self._load(first, start - self._plan.first_steps[first], rank, world)
        self._loaded = self._chained(loaded, later, rank, world) if later else loaded

    def prepare(self) -> None:
        """Compute the sample ids and the seed of the next step, without loading samples."""
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


class LoadRequests:
    """An iterator over requests to load samples. `prepare` computes the next request early."""

    def __init__(self, wanted: Iterator[LoadRequest]) -> None:
        self._wanted = wanted
        self._next: LoadRequest | None = None

    def __iter__(self) -> Iterator[LoadRequest]:
        return self

    def __next__(self) -> LoadRequest:
        request, self._next = self._next, None
        return request or next(self._wanted)

    def prepare(self) -> None:
        """Compute the next request now, without loading samples or drawing random numbers."""
        if self._next is None:
            self._next = next(self._wanted, None)


def requests(
    plan: SamplePlan, start: int, rank: int, world: int, record: RecordOrder | None = None, first_epoch: int = 0
) -> Iterator[LoadRequest]:
    """Yield one request per step of `plan`, from step `start` on, for the samples that `rank` of `world` ranks trains.

    If a sampler determines the order, rank 0 calls `record` with each epoch and its order, before the epoch's requests.
    `first_epoch` is the number of the plan's first epoch in the run."""
    if plan.orders and rank == 0 and record:
        yield from _recorded_requests(plan, plan.orders, start, world, record, first_epoch)
        return
    yield from _requests(plan, start, plan.steps, rank, world, first_epoch)


def _recorded_requests(
    plan: SamplePlan, orders: EpochOrders, start: int, world: int, record: RecordOrder, first_epoch: int
) -> Iterator[LoadRequest]:
    # Live recovery divides after the step that a lost rank 0 was in, and it may not have recorded the order of that step.
    for epoch in range(plan.position(max(0, start - 1)).epoch, plan.epochs):
        record(first_epoch + epoch, orders.of(epoch))
        end = plan.end_of(epoch)
        yield from _requests(plan, start, end, 0, world, first_epoch)
        start = max(start, end)


def _requests(plan: SamplePlan, start: int, end: int, rank: int, world: int, first_epoch: int) -> Iterator[LoadRequest]:
    places = plan.places(rank, world)
    together = max(1, CHUNK // len(places))
    for chunk in range(start, end, together):
        steps = range(chunk, min(chunk + together, end))
        shares = plan.windows(steps, places)
        ahead = zip(steps, shares, Samples.of_each(shares), strict=True)
        while requested := [
            LoadRequest(ids, ids.tolist(), samples, _key(plan, plan.position(step), rank, first_epoch))
            for step, ids, samples in islice(ahead, TOGETHER)
        ]:
            yield from requested


def share_key(plan: RunPlan, step: int, share: int) -> int:
    """Return the seed of the random generators for the samples that rank `share` trains in `step`."""
    phase, local = plan.phase(step)
    return _key(phase, phase.position(local), share, plan.first_epochs[plan.index(step)])


def _key(plan: SamplePlan, at: Position, share: int, first_epoch: int) -> int:
    return rng.key(plan.seed, rng.WINDOW, first_epoch + at.epoch, at.cursor, share)
