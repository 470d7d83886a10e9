"""The loop of a run: windows handed out one after the other, and what happens at the boundaries between them.

The generator's `next` is the boundary: put the step that was trained on record, save if it is due, stop if asked to,
let a due failure strike, hand out the next window.

What is protected stays as it came back, while a script does again what it does before the batches of an epoch.

A run that goes on in the middle of an epoch hands out the rest of it. What the script does before an epoch's batches
(set a learning rate, step a schedule) it has done before, and that is in the state that came back: it must not count
twice.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterator, KeysView, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from holdfast import progress
from holdfast.blocks.division import Ids
from holdfast.checkpoint.state_tree import flatten
from holdfast.distributed import script_collectives
from holdfast.distributed.boundary import NEVER, BoundaryGate
from holdfast.distributed.membership import Asleep
from holdfast.distributed.ranks import Changed, Ranks
from holdfast.errors import BadInput, WorkerLost
from holdfast.events import Done, Preempted, Recover, Stopped
from holdfast.live.recovery import LiveRecovery
from holdfast.process import PREEMPTED
from holdfast.progress import Phase, restart_needed
from holdfast.sampler.plan import Position, SamplePlan
from holdfast.train import loop_checks
from holdfast.train import stopping as ending
from holdfast.train.data.loader import SampleSource, divided, share_key
from holdfast.train.inject import Injection
from holdfast.train.nested import moved
from holdfast.train.observe.observer import StepObserver
from holdfast.train.replicate import Replica, holding_back
from holdfast.train.state import rng
from holdfast.train.state.attempt import Recorder
from holdfast.train.state.fingerprint import Fingerprints
from holdfast.train.state.protected import Protected, tree_digest
from holdfast.train.state.save import Saves, Unsaved
from holdfast.train.step_log import Effort, Handed, Place, Reporting, clock_of
from holdfast.train.stopping import Apart, Stopping


class Keeping:
    """Puts back what is protected, if it was changed."""

    def __init__(self, protected: Protected, fingerprints: Fingerprints, put_back: Callable[[], None]) -> None:
        self._protected, self._fingerprints, self._put_back = protected, fingerprints, put_back

    @contextmanager
    def state(self, again: bool) -> Iterator[None]:
        """If this is done again, what is protected is afterwards what it was before."""
        before = self._mark() if again else None
        yield
        if before is not None and self._mark() != before:
            self._put_back()

    def _mark(self) -> tuple[str | None, str]:
        """Cheap, since it is taken twice: a few values of every tensor, and all else."""
        return self._fingerprints.take().digest(), tree_digest(flatten(self._protected.capture()))


FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Batch:
    """What to train next: this rank's share of a window, or one micro-batch of it.

    `weight` is the micro-batch's part of the share: a mean loss times it adds up to the mean over the share. After the
    `is_last` one the optimizer steps. A batch is used like the data it carries: `x, y = batch`, `batch["input_ids"]`,
    `model(**batch)`; `batch.to(device)` is the batch with its tensors there.
    """

    data: Any
    ids: Ids
    weight: float
    is_last: bool
    epoch: int
    cursor: int
    step: int

    def to(self, *where: Any, **how: Any) -> "Batch":
        """The same batch with every tensor of its data moved, as by `Tensor.to`, however they are nested."""
        return replace(self, data=moved(self.data, *where, **how))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def keys(self) -> KeysView[Any]:
        """The keys of a batch of dicts: they make `model(**batch)` work."""
        if not isinstance(self.data, Mapping):
            raise BadInput(f"the batch holds a {type(self.data).__name__}, which has no keys: use batch.data.")
        return self.data.keys()


@dataclass(slots=True, eq=False)
class Opening:
    """An epoch begins, or goes on after a restart, with this step; its batches follow."""

    epoch: int
    step: int


class RunStopped(Exception):
    """The script has stopped the run: nothing more is handed out."""


class Loss:
    """What the user says of the step that is being trained."""

    def __init__(self) -> None:
        self._loss: float | None = None

    def log(self, loss: float) -> None:
        """Remember it until the step is on record; of several the last."""
        self._loss = float(loss)

    def take(self) -> float | None:
        """What to put on record; nothing if nothing was said."""
        loss, self._loss = self._loss, None
        return loss


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """Everything that a boundary needs."""

    geometry: SamplePlan
    start: int
    end: int  # windows: all of them, but in a rehearsal
    world: Ranks
    attempt: int
    record: Recorder
    recover: Callable[[int, int], Recover]
    reporting: Reporting
    effort: Effort
    saves: Saves
    turn: BoundaryGate
    stopping: Stopping
    injection: Injection
    loss: Loss
    replicas: list[Replica]
    source: SampleSource
    part: Place
    live: LiveRecovery | None
    by_epoch: bool  # whether epochs are opened, each after its boundary
    keeping: Keeping
    watch: StepObserver | None  # in a rehearsal
    unmet: set[int] = field(default_factory=set)  # boundaries at which not all ranks meet
    pid: int = field(default_factory=os.getpid)
    _free_until: int = 0  # the next boundary at which something is planned

    def run(self) -> Generator[Batch | Opening]:
        """Hand out every share as its micro-batches, with a boundary before and after."""
        step, opened, handed = self.start, None, None
        try:
            now = clock_of(self.world.device)
            for step, at, stall in self._windows():
                if self.by_epoch and opened != at.epoch:
                    opened = at.epoch
                    with self.keeping.state(at.cursor > 0):
                        yield Opening(at.epoch, step)
                waited = perf_counter()
                request, parts = next(self.source)
                data = perf_counter() - waited
                handed = (step, at, request.samples, data, stall, now())
                untouched = self._untouched() if step == 0 else None
                if self.watch:
                    self.watch.begins(step, at.epoch, request.ids, parts)
                if len(parts) == 1:
                    yield Batch(parts[0], request.ids, 1.0, True, *at, step)
                else:
                    for batch in self._micro_batches(request.ids, parts, at, step):
                        yield batch
                        untouched = untouched and untouched()
                untouched = untouched and untouched()
                if not self._is_ours:
                    raise BadInput(
                        "a process that the script has forked inside of its loop goes on with it, and only the worker "
                        "itself may: end the other one with os._exit()"
                    )
                if self.watch:
                    self.watch.ends()
                self.reporting.trained(handed, (now(), self._taken(step), self.loss.take()))
                handed = None
                if step == 0:
                    self.saves.prepare()  # again: optimizers have made their moments in the first step
                step += 1
            self._end(self.geometry.position(self.end))
            if self.end < self.geometry.steps:
                raise SystemExit(0)  # a rehearsal: what the script does with a trained model is not for this one
        except RunStopped:
            return
        except GeneratorExit:
            if not self._is_ours:
                raise
            if loop_checks.left_in_order(sys._getframe()):
                self._left(step, handed)
            else:
                self._abandon()
            raise
        finally:
            if self._is_ours:
                self.stopping.close()
                self.effort.close()

    @property
    def _is_ours(self) -> bool:
        """Whether this is the worker, and not a process that its script has forked: that has no part in the run."""
        return os.getpid() == self.pid

    def _untouched(self) -> Callable[[], None] | None:
        """Refuses a script that has done nothing with the first batch of a run when it asks for the next one."""
        before = self.reporting.fingerprints.take().digest()
        if before is None or isinstance(self.saves, Unsaved):  # there is nothing to see, or nothing to go on from
            return None

        def check() -> None:
            if self.effort.is_idle and self.reporting.fingerprints.take().digest() == before:
                raise loop_checks.refused()

        return check

    def _abandon(self) -> None:
        """An exception left the loop: whether this step was trained to its end is not known, so it does not count."""
        self.reporting.settle()
        self.saves.close()
        self.record.close()

    def _left(self, step: int, handed: Handed | None) -> None:
        """The script left the loop, which ends the run: after this window if an optimizer has stepped in it, or before.

        A window that was dropped because members were lost in it is over, too.
        """
        progress.here.enter(Phase.CLOSING)
        if handed and ((taken := self._taken(step))[2] or (self.live and self.live.is_dropped(step))):
            now = clock_of(self.world.device)
            self.reporting.trained(handed, (now(), taken, self.loss.take()))
            step += 1
        try:
            self._regroup(step, last=True)
            self.stopping.leave(step)
            at = self.geometry.position(step)
            if step == self.geometry.steps:
                self._end(at)
            else:
                self._stop(step, at, left=True)
        except (Apart, WorkerLost) as error:
            self._abandon()
            ending.die(error)
        except (Asleep, Changed):
            self._abandon()  # a peer is lost
        except RunStopped:
            pass

    def meanwhile(self) -> None:
        """In backward, while gradients are summed: what the next boundary would otherwise do."""
        if self.live:
            self.reporting.settle()  # a rank that is lost is not rolled back: what it did must be on record
        else:
            self.reporting.settle_known()
            if self.world.rank == 0:
                self.record.flush()  # somebody may be looking how far the run is, and nobody knows when the next step comes
        self.source.prepare()

    def _taken(self, step: int) -> tuple[int, int, int]:
        """What was done with the window that was trained."""
        reduced, held, stepped = self.effort.taken()
        if self.live:
            self.live.end_step(stepped)
            if self.live.is_dropped(step):
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
        start = self._arrive(self.live) if self.live and self.live.is_joining else self.start
        self.record.append(self.recover(start, self.part.rank))
        self.record.flush()
        self.source.divide(start, self.part.rank, self.part.of)
        return start, self.geometry.position(start)

    def _arrive(self, live: LiveRecovery) -> int:
        """Become a member: the window to begin with."""
        start = live.join()
        self.part.rank, self.part.of = live.place
        self.injection.set_rank(live.member)
        return start

    def _micro_batches(self, ids: Ids, parts: list[Any], at: Position, step: int) -> Iterator[Batch]:
        for number, (part, data) in enumerate(zip(divided(len(ids), len(parts)), parts, strict=True), 1):
            last = number == len(parts)
            with nullcontext() if last else holding_back(self.replicas):
                yield Batch(data, ids[part.start : part.stop], len(part) / len(ids), last, *at, step)

    def _boundary(self, step: int, at: Position) -> float:
        """The boundary before a window; how long training waited for a save."""
        # At most of them nothing is planned, nobody waits for us, and there is nothing more to it.
        if step < self._free_until and not self.stopping.wanted and self.turn.passes(step):
            stall = 0.0
        else:
            stall = self._meet(step, at)
            self._free_until = self._planned(step, at)
        progress.here.pass_boundary(step)
        if self.live:
            self.live.begin_step(step)
        return stall

    def _planned(self, step: int, at: Position) -> int:
        """The first boundary after this one at which there is something to do, as far as that is known."""
        if self.saves.is_under_way:
            return step + 1
        ends = step - at.cursor + self.geometry.steps_per_epoch if self.by_epoch else NEVER
        return min(self.saves.next, self.injection.next(step + 1), ends)

    def _meet(self, step: int, at: Position) -> float:
        """Do what is to be done at a boundary, with the peers that there are; how long training waited for a save."""
        while True:
            try:
                self._regroup(step)
                return self._before(step, at)
            except Changed:
                continue  # a peer that was waited for is lost: with those that are left, once more

    def _regroup(self, step: int, *, last: bool = False) -> None:
        """If members were lost or have come, go on with those that there are; at the last boundary nobody comes."""
        live = self.live
        if live is None:
            return
        try:
            divides, settled = live.at_boundary(step, last=last)
        except Asleep:
            live.suspend()
            raise
        if divides:
            self.reporting.settle()
            self.part.rank, self.part.of = live.coordination.rank, len(live.members)
            if not last:
                self.source.divide(step, self.part.rank, self.part.of)
        if settled is not None or divides:
            self.unmet.update(() if settled is None else (settled,))  # some have passed this boundary
            self.world.renumber(live.coordination.rank, len(live.members), live.coordination.number)
            self.saves.regroup(None if last and settled == step else settled)  # the last state is saved by all
            self.stopping.begin(step)

    def _before(self, step: int, at: Position) -> float:
        """The boundary before a window; how long training waited for a save."""
        settled = not self.effort.is_pending
        if self.by_epoch and at.cursor == 0 and step and step not in self.unmet:
            self.stopping.agree(step)
        stall = self._save(step, at) if settled and step >= self.saves.next else 0.0
        self.saves.collect()
        if self.stopping.here(step) and settled:
            self._stop(step, at)
        if self.injection.next(step) == step:
            self.reporting.settle()  # it may be the last that we do
            self.injection.strike(step)
        return stall

    def _save(self, step: int, at: Position) -> float:
        """Save the state before this window; a run that goes on from there is stopped, if a script has asked for it."""
        self.reporting.settle()  # no snapshot covers a step that is not on record
        if self.live:
            script_collectives.has_exchanged()  # whoever watches hears of it now, and not only once somebody is lost
        # What is captured is what a resumed run will have: the generators as they are keyed for the next window.
        self._key(at)
        with progress.during(Phase.SAVING):
            return self.saves.take(step, at, stops=self.stopping.wanted and step < self.geometry.steps)

    def _key(self, at: Position) -> None:
        rng.set_all(share_key(self.geometry, at, self.part.rank))

    def _stop(self, step: int, at: Position, *, left: bool = False) -> None:
        progress.here.enter(Phase.CLOSING)
        self.stopping.wanted = self.stopping.by_script
        self._save(step, at)
        self.saves.close()
        self.stopping.meet()
        if self.stopping.by_script:
            self._leave(Stopped(self.attempt, step, left))
            raise RunStopped
        self._leave(Preempted(self.attempt, step))
        raise SystemExit(PREEMPTED)

    def _end(self, at: Position) -> None:
        try:
            self._regroup(self.end, last=True)  # members may have been lost in the last window
            progress.here.enter(Phase.CLOSING)
            self._save(self.end, at)
            self.saves.close()
            self.world.from_rank_0(FINISHED, None if self.world.rank else "")  # done is done once the state is durable
        except (Asleep, Changed):
            raise restart_needed("a member was lost while the last state was saved") from None
        self._leave(Done(self.attempt, self.end))

    def _leave(self, last: Done | Preempted | Stopped) -> None:
        self.record.append(last)
        self.record.close()
        progress.here.enter(Phase.DONE)
