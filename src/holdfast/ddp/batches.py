"""The loop of a run: windows handed out one after the other, and what happens at the boundaries between them.

The generator's `next` is the boundary: put the step that was trained on record, save if it is due, stop if asked to,
let a due failure strike, hand out the next window.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from holdfast import progress
from holdfast.blocks import Ids
from holdfast.ddp import generators
from holdfast.ddp.clock import clock_of
from holdfast.ddp.effort import Effort
from holdfast.ddp.inject import Injection
from holdfast.ddp.live import Live
from holdfast.ddp.loading import Source, divided, share_key
from holdfast.ddp.meeting import Asleep
from holdfast.ddp.preemption import PREEMPTED
from holdfast.ddp.record import Record
from holdfast.ddp.rehearsed import Unwatched
from holdfast.ddp.replica import Replica, holding_back
from holdfast.ddp.reporting import Part, Reporting, Trained
from holdfast.ddp.saving import Saves
from holdfast.ddp.stopping import Stopping
from holdfast.ddp.world import Changed, World
from holdfast.errors import BadInput
from holdfast.events import Done, Preempted, Recover
from holdfast.geometry import Geometry, Position
from holdfast.progress import Phase

FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Batch:
    """What to train next: this rank's share of a window, or one micro-batch of it.

    `weight` is the micro-batch's part of the share: a mean loss times it adds up to the mean over the share. After the
    `last` one the optimizer steps. A batch unpacks as its data does: `for x, y in run.batches(...)`.
    """

    data: Any
    ids: Ids
    weight: float
    last: bool
    epoch: int
    cursor: int
    step: int

    @property
    def x(self) -> Any:
        """The first of a pair."""
        return self._pair()[0]

    @property
    def y(self) -> Any:
        """The second of a pair."""
        return self._pair()[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def _pair(self) -> Any:
        if not (isinstance(self.data, list | tuple) and len(self.data) == 2):
            raise BadInput(f"the samples of this dataset are no pairs but a {type(self.data).__name__}: use batch.data")
        return self.data


class Loss:
    """What the user says of the step that is being trained."""

    def __init__(self) -> None:
        self._loss: float | None = None

    def note(self, loss: float) -> None:
        """Remember it until the step is on record; of several the last."""
        self._loss = float(loss)

    def take(self) -> float | None:
        """What to put on record; nothing if nothing was said."""
        loss, self._loss = self._loss, None
        return loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loop:
    """Everything that a boundary needs."""

    geometry: Geometry
    start: int
    end: int  # windows: all of them, but in a rehearsal
    world: World
    attempt: int
    record: Record
    recover: Callable[[int, int], Recover]
    reporting: Reporting
    effort: Effort
    saves: Saves
    stopping: Stopping
    injection: Injection
    loss: Loss
    replicas: list[Replica]
    source: Source
    part: Part
    live: Live | None
    watch: Unwatched

    def run(self) -> Generator[Batch]:
        """Hand out every share as its micro-batches, with a boundary before and after."""
        try:
            now = clock_of(self.world.device)
            for step, at, stall in self._windows():
                waited = perf_counter()
                request, parts = next(self.source)
                data = perf_counter() - waited
                began = now()
                self.watch.begins(step, at.epoch, request.ids, parts)
                if len(parts) == 1:
                    yield Batch(parts[0], request.ids, 1.0, True, *at, step)
                else:
                    yield from self._micro_batches(request.ids, parts, at, step)
                self.watch.ends()
                done = (began, now(), self._taken(step), self.loss.take())
                self.reporting.trained(Trained(step, at, request.samples, data, stall, *done))
                if step == 0:
                    self.saves.prepare()  # again: optimizers have made their moments in the first step
            self._end(self.geometry.position(self.end))
            if self.end < self.geometry.steps:
                raise SystemExit(0)  # a rehearsal: what the script does with a trained model is not for this one
        except GeneratorExit:
            # The user left the loop. Whether this step was trained to its end is not known, so it does not count.
            self.reporting.settle()
            self.saves.close()
            self.record.close()
            raise
        finally:
            self.stopping.close()
            self.effort.close()

    def meanwhile(self) -> None:
        """In backward, while gradients are summed: what the next boundary would otherwise do."""
        if self.live:
            self.reporting.settle()  # a rank that is lost is not rolled back: what it did must be on record
        else:
            self.reporting.settle_known()
        self.source.prepare()

    def _taken(self, step: int) -> tuple[int, int, int]:
        """What was done with the window that was trained."""
        reduced, held, stepped = self.effort.taken()
        if self.live:
            self.live.ends()
            if self.live.has_dropped(step):
                return reduced, held, 0  # its optimizers had no gradients to step with
        return reduced, held, stepped

    def _windows(self) -> Iterator[tuple[int, Position, float]]:
        """Every window that this rank has a part in, after its boundary, and how long that waited for a save."""
        step, at = self._begin()
        while step < self.end:
            try:
                stall = self._boundary(step, at)
            except Asleep:
                step, at = self._begin()
                continue
            yield step, at, stall
            step, at = step + 1, self.geometry.following(at)

    def _begin(self) -> tuple[int, Position]:
        """The window that we begin with; and say with what, as it is in memory now."""
        start = self._arrive(self.live) if self.live and self.live.joins else self.start
        self.record.append(self.recover(start, self.part.rank))
        self.record.flush()
        self.source.divide(start, self.part.rank, self.part.of)
        return start, self.geometry.position(start)

    def _arrive(self, live: Live) -> int:
        """Become a member: the window to begin with."""
        start = live.arrive()
        self.part.rank, self.part.of = live.place
        self.injection.become(live.me)
        return start

    def _micro_batches(self, ids: Ids, parts: list[Any], at: Position, step: int) -> Iterator[Batch]:
        for number, (part, data) in enumerate(zip(divided(len(ids), len(parts)), parts, strict=True), 1):
            last = number == len(parts)
            with nullcontext() if last else holding_back(self.replicas):
                yield Batch(data, ids[part.start : part.stop], len(part) / len(ids), last, *at, step)

    def _boundary(self, step: int, at: Position) -> float:
        """The boundary before a window, with the peers that there are then; how long training waited for a save."""
        while True:
            try:
                self._regroup(step)
                stall = self._before(step, at)
                if self.live:
                    self.live.begins(step)
                return stall
            except Changed:
                continue  # a peer that was waited for is lost: with those that are left, once more

    def _regroup(self, step: int) -> None:
        """If members were lost or have come, go on with those that there are."""
        live = self.live
        if live is None:
            return
        try:
            divides = live.boundary(step)
        except Asleep:
            live.sleep()
            raise
        if divides:
            self.reporting.settle()
            self.part.rank, self.part.of = live.meeting.rank, len(live.members)
            self.source.divide(step, self.part.rank, self.part.of)
        if (settled := live.take_settled()) is not None or divides:
            self.world.become(live.meeting.rank, len(live.members), live.meeting.number)
            self.saves.regroup(settled)
            self.stopping.begin(step)

    def _before(self, step: int, at: Position) -> float:
        """The boundary before a window; how long training waited for a save."""
        settled = not self.effort.is_pending
        stall = self._save(step, at) if settled and self.saves.due(step) else 0.0
        self.saves.collect()
        if self.stopping.here(step) and settled:
            self._stop(step, at)
        if self.injection.is_near(step):
            self.reporting.settle()  # it may be the last that we do
            self.injection.strike(step)
        progress.here.passes(step)
        return stall

    def _save(self, step: int, at: Position) -> float:
        self.reporting.settle()  # no snapshot covers a step that is not on record
        # What is captured is what a resumed run will have: the generators as they are keyed for the next window.
        self._key(at)
        with progress.during(Phase.SAVING):
            return self.saves.take(step, at)

    def _key(self, at: Position) -> None:
        generators.set_all(share_key(self.geometry, at, self.part.rank))

    def _stop(self, step: int, at: Position) -> None:
        progress.here.enters(Phase.CLOSING)
        self._save(step, at)
        self.saves.close()
        self.stopping.meet()
        self._leave(Preempted(self.attempt, step))
        raise SystemExit(PREEMPTED)

    def _end(self, at: Position) -> None:
        progress.here.enters(Phase.CLOSING)
        self._save(self.end, at)
        self.saves.close()
        self.world.from_first(FINISHED, None if self.world.rank else "")  # done is done once the state is durable
        self._leave(Done(self.attempt, self.end))

    def _leave(self, last: Done | Preempted) -> None:
        self.record.append(last)
        self.record.close()
        progress.here.enters(Phase.DONE)
