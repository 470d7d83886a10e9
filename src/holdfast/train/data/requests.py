"""Requests to load the samples of each step: the ids of one rank's samples, and the seed of the random generators."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from holdfast.blocks.division import Ids
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import EpochOrders, Position, SamplePlan
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.state import rng

RecordOrder = Callable[[int, Ids], None]
CHUNK = 1 << 14  # sample ids computed together: the calls take most of the time of a few
TOGETHER = 16  # requests made together: each takes a quarter of its time alone (benchmarks/steady)


@dataclass(slots=True, eq=False)
class LoadRequest:
    """A request to load the samples `ids` of one rank in one step. `key` seeds the random generators for them.

    `numbers` are the same ids as Python integers, `samples` their count and digest.
    """

    ids: Ids
    numbers: list[int]
    samples: Samples
    key: int


class LoadRequests:
    """An iterator of requests to load samples; the next request can be prepared early, while gradients are summed."""

    def __init__(self, wanted: Iterator[LoadRequest]) -> None:
        self._wanted = wanted
        self._next: LoadRequest | None = None

    def __iter__(self) -> Iterator[LoadRequest]:
        return self

    def __next__(self) -> LoadRequest:
        request, self._next = self._next, None
        return request or next(self._wanted)

    def prepare(self) -> None:
        """Compute the next request now. This loads no samples and draws no random numbers."""
        if self._next is None:
            self._next = next(self._wanted, None)


def requests(
    geometry: SamplePlan, start: int, rank: int, world: int, record: RecordOrder | None = None, first_epoch: int = 0
) -> Iterator[LoadRequest]:
    """Yield the requests for the samples of `rank` among `world` ranks, one per step of a phase from step `start` on.

    If a sampler determines the order, rank 0 calls `record` with each epoch and its order, before the epoch's requests.
    The epochs of the phase are counted from `first_epoch`.
    """
    if geometry.orders and rank == 0 and record:
        yield from _recorded_requests(geometry, geometry.orders, start, world, record, first_epoch)
        return
    yield from _requests(geometry, start, geometry.steps, rank, world, first_epoch)


def _recorded_requests(
    geometry: SamplePlan, orders: EpochOrders, start: int, world: int, record: RecordOrder, first_epoch: int
) -> Iterator[LoadRequest]:
    # Live recovery divides after the step that a lost rank 0 was in, and it may not have recorded the order of that step.
    for epoch in range(geometry.position(max(0, start - 1)).epoch, geometry.epochs):
        record(first_epoch + epoch, orders.of(epoch))
        end = geometry.end_of(epoch)
        yield from _requests(geometry, start, end, 0, world, first_epoch)
        start = max(start, end)


def _requests(
    geometry: SamplePlan, start: int, end: int, rank: int, world: int, first_epoch: int
) -> Iterator[LoadRequest]:
    places = geometry.places(rank, world)
    together = max(1, CHUNK // len(places))
    for chunk in range(start, end, together):
        steps = range(chunk, min(chunk + together, end))
        shares = geometry.windows(steps, places)
        ahead = zip(steps, shares, Samples.of_each(shares), strict=True)
        while requested := [
            LoadRequest(ids, ids.tolist(), samples, _key(geometry, geometry.position(step), rank, first_epoch))
            for step, ids, samples in islice(ahead, TOGETHER)
        ]:
            yield from requested


def share_key(plan: RunPlan, step: int, share: int) -> int:
    """Return the seed of the random generators for the samples of rank `share`, in `step`."""
    phase, local = plan.phase(step)
    return _key(phase, phase.position(local), share, plan.first_epochs[plan.index(step)])


def _key(geometry: SamplePlan, at: Position, share: int, first_epoch: int) -> int:
    return rng.key(geometry.seed, rng.WINDOW, first_epoch + at.epoch, at.cursor, share)
