"""The training loop of a run: a generator that hands out one step after another, with a boundary before each.

At the boundary, when the script asks for the next batch, the loop records the trained step, saves if a save is due,
stops if asked to, lets an injected failure strike, and then hands out the next step.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from holdfast import progress
from holdfast.blocks.division import Ids
from holdfast.distributed.membership import Suspended
from holdfast.distributed.process_group import has_script_collectives
from holdfast.distributed.ranks import NEVER, BoundaryGate, Ranks, RanksChanged
from holdfast.errors import BadInput
from holdfast.events import Done, Preempted, Recover, Stopped
from holdfast.live.recovery import LiveRecovery
from holdfast.process import PREEMPTED
from holdfast.progress import Phase, restart_needed
from holdfast.sampler.plan import Position
from holdfast.sampler.run_plan import RunPlan
from holdfast.train.data.loader import divided
from holdfast.train.data.phases import Phases, SampleSource, share_key
from holdfast.train.guards import FirstBatchCheck, StateKeeper
from holdfast.train.inject import Injection
from holdfast.train.iterators import Batch, EpochStart, LoopItems, PhaseStart
from holdfast.train.observe.script_state import frames_of_script
from holdfast.train.observe.unprotected_state import UnprotectedStateCheck
from holdfast.train.replicate import Replica, holding_back
from holdfast.train.state import rng
from holdfast.train.state.attempt import Recorder
from holdfast.train.state.save import Saves
from holdfast.train.step_log import RankPlacement, StepRecorder
from holdfast.train.stopping import Stopping
from holdfast.train.witness import Witness

if TYPE_CHECKING:
    from holdfast.train.sharded import ShardedModels  # a slow import

FINISHED = "finished"


class RunStopped(Exception):
    """Raised to end the training loop when the script has stopped the run before its planned end."""


@dataclass(slots=True, kw_only=True, eq=False)
class Boundary:
    """The work between two steps: let workers leave and join, save, stop, and inject planned failures."""

    phases: Phases
    plan: RunPlan
    end: int  # the step at which the loop ends: that of the plan, except in a rehearsal
    ranks: Ranks
    attempt: int
    record: Recorder
    place: RankPlacement
    source: SampleSource
    steps: StepRecorder
    saves: Saves
    stopping: Stopping
    gate: BoundaryGate
    injection: Injection | None  # None if no failures are planned
    live: LiveRecovery | None
    witness: Witness | None  # None if the states of the ranks are not compared
    recover: Callable[[int, int], Recover]
    _passed_by_some: set[int] = field(default_factory=set)  # boundaries at which not all ranks meet
    _free_until: int = 0  # the next boundary at which something is planned
    has_joined: bool = False  # the state of this worker came from another one

    def begin(self, start: int) -> tuple[int, Position]:
        """Record the initial state of this rank; return its first step and the position of that step in the data.

        The first step is `start`, but a worker that joins during a run begins with the step of the other workers."""
        if self.live and self.live.is_joining:
            start, self.has_joined = self.live.join(), True
            self.place.rank, self.place.world_size = self.live.place
            if self.injection:
                self.injection.set_rank(self.live.member)
        self.record.append(self.recover(start, self.place.share))
        self.record.flush()
        self.source.divide(start, self.place.share, self.place.shares)
        return start, self.plan.position(start)

    def cross(self, step: int, at: Position) -> float:
        """Do the work that is due before `step`, such as a save; return the seconds that training waited for a save.

        `at` is the position of the step in the data."""
        if self.live:
            self.live.reach_boundary(step)
        # At most boundaries nothing is due and no thread waits: one look at a lock saves 11 us (benchmarks/steady).
        if step < self._free_until and not self.stopping.wanted and self.gate.passes(step):
            stall = 0.0
        else:
            stall = self._cross_with_peers(step, at)
            self._free_until = self._next_planned(step)
        progress.here.pass_boundary(step)
        if self.live:
            self.live.begin_step(step)
        return stall

    def finish(self) -> None:
        """End the run after its last step: save the state, and record that the run is complete."""
        if self.live:
            self.live.reach_boundary(self.end)
        try:
            self._follow_membership(self.end, last=True)  # members may have been lost in the last step
            progress.here.phase = Phase.CLOSING
            self.saves.hurry()
            self._save(self.end, self.plan.position(self.end))
            if self.witness:
                self.witness.wait()
            self.saves.close()
            self.ranks.from_rank_0(FINISHED, None if self.ranks.rank else "")  # once the state is durable
        except (Suspended, RanksChanged):
            raise restart_needed("a member was lost while the last state was saved") from None
        self._leave(Done(self.attempt, self.end))

    def abandon(self) -> None:
        """Close the step log, saver and history when the script leaves the loop early. The current step is lost."""
        self.steps.log.write_all()
        self.saves.close()
        self.record.close()

    def close(self) -> None:
        """Stop the thread that listens for stop requests, and remove the loop's optimizer hook."""
        self.stopping.close()
        self.steps.work.close()

    def _next_planned(self, step: int) -> int:
        """Return the first step after `step` with work before it: a save, a failure, or the end of an epoch or phase."""
        if self.saves.is_under_way or (self.witness and self.witness.is_under_way):
            return step + 1
        failure = self.injection.next(step + 1) if self.injection else NEVER
        witness = self.witness.next if self.witness else NEVER
        return min(self.saves.next, witness, failure, self.phases.seam_after(step))

    def _cross_with_peers(self, step: int, at: Position) -> float:
        while True:
            try:
                self._follow_membership(step)
                return self._do_due(step, at)
            except RanksChanged:
                continue  # a peer that this rank waited for is lost: again with those that are left

    def _follow_membership(self, step: int, *, last: bool = False) -> None:
        """Recover from lost workers, admit new workers, and divide the samples from `step` on among those now present.

        If `last`, all steps are trained, and no worker joins."""
        live = self.live
        if live is None:
            return
        try:
            is_divided, settled = live.at_boundary(step, last=last)
        except Suspended:
            live.suspend()
            raise
        rank, size = live.coordination.rank, len(live.members)
        if is_divided:
            self.steps.log.write_all()
            self.place.rank, self.place.world_size = rank, size
            if not last:
                self.source.divide(step, rank, size)
        if settled is not None:
            self._passed_by_some.add(settled)
        if settled is not None or is_divided:
            self.ranks.renumber(rank, size, live.coordination.number)
            passed = None if last and settled == step else settled  # all ranks save the last state
            self.saves.regroup(passed)
            if self.witness:
                self.witness.regroup(passed)
            self.stopping.begin(step)

    def _do_due(self, step: int, at: Position) -> float:
        is_complete = not self.steps.work.is_pending
        self._agree_after_epoch(step)
        stall = self._save(step, at) if is_complete and step >= self.saves.next else 0.0
        self.saves.collect()
        if self.witness:
            if step >= self.witness.next:
                self.witness.take(step)
            self.witness.collect()
        if self.stopping.is_here(step) and is_complete:
            self._stop(step, at)
        if self.injection and self.injection.next(step) == step:
            self.steps.log.write_all()  # this may be the last thing that the process does
            self.injection.strike(step)
        return stall

    def _agree_after_epoch(self, step: int) -> None:
        if self.phases.is_seam(step) and step not in self._passed_by_some:
            self.stopping.agree(step)

    def _save(self, step: int, at: Position) -> float:
        """Save the state before `step`, at position `at` in the data; return the seconds that this took."""
        self.steps.log.write_all()  # a snapshot never covers a step that is missing from the history
        if self.live:
            has_script_collectives()  # tells the supervisor now that the script has collectives of its own
        # The generators are saved as they are keyed for the next step: that is what a resumed run starts with.
        rng.set_all(share_key(self.plan, step, self.place.share))
        with progress.during(Phase.SAVING):
            if self.witness:
                self.witness.take(step)
            return self.saves.take(step, at, stops=self.stopping.wanted and step < self.plan.steps)

    def _stop(self, step: int, at: Position) -> None:
        progress.here.phase = Phase.CLOSING
        self.saves.hurry()
        self._save(step, at)
        if self.witness:
            self.witness.wait()
        self.saves.close()
        self.stopping.wait_for_save()
        if self.stopping.wanted:
            self._leave(Stopped(self.attempt, step))
            raise RunStopped
        self._leave(Preempted(self.attempt, step))
        raise SystemExit(PREEMPTED)

    def _leave(self, event: Done | Preempted | Stopped) -> None:
        self.record.append(event)
        self.record.close()
        progress.here.phase = Phase.DONE


@dataclass(slots=True, kw_only=True, eq=False)
class Loop:
    """The training loop of one rank, which yields the batches of the run from step `start` to the end."""

    phases: Phases
    plan: RunPlan
    start: int
    source: SampleSource
    replicas: list[Replica]
    sharded: "ShardedModels | None"
    boundary: Boundary
    steps: StepRecorder
    keeper: StateKeeper
    first_batch: FirstBatchCheck | None
    unprotected: UnprotectedStateCheck | None
    pid: int = field(default_factory=os.getpid)
    left_in: int | None = None  # the step in which the script left the loop before the run had ended

    def run(self) -> LoopItems:
        """Yield the batches of all steps, with a marker before each phase, and before each epoch of `run.epochs`."""
        step = self.start
        try:
            step, at = self.boundary.begin(self.start)
            entered, opened = -1, -1  # the phase and the epoch of the last markers
            while step < self.boundary.end:
                try:
                    stall = self.boundary.cross(step, at)
                except Suspended:
                    step, at = self.boundary.begin(self.start)
                    continue
                if (index := self.plan.index(step)) != entered:
                    with self._keeping_between_phases(index, is_first=entered < 0):
                        yield PhaseStart(index)
                    entered = index
                    self._set_weights(step)
                if self.phases[index].by_epoch and opened != at.epoch:
                    opened = at.epoch
                    with self._keeping_within_epoch(at):
                        yield EpochStart(at.epoch - self.plan.first_epochs[index], self.plan.phase(step)[1])
                yield from self._step(step, at, stall)
                step, at = step + 1, self.plan.position(step + 1)
            self.boundary.finish()
            if self.boundary.end < self.plan.steps:
                raise SystemExit(0)  # a rehearsal leaves out what the script does with a trained model
        except RunStopped:
            return
        except GeneratorExit:
            # The script has dropped the generator: by `break`, by `return`, or because an exception was raised. Python does
            # not tell these apart, and an exception may leave a step half trained. So the run does not end here: it is
            # unfinished, and resumes from its newest snapshot. To end it early a script calls run.stop().
            if self._is_own_process:
                self.left_in = step
                self.boundary.abandon()
            raise
        finally:
            if self._is_own_process:
                self.boundary.close()

    def _keeping_between_phases(self, index: int, *, is_first: bool) -> AbstractContextManager[None]:
        """Return a context manager for the script's code before phase `index`. It may undo changes of protected state.

        It does so if the script resumes in a later phase than the first: the script then repeats changes that the
        restored state already contains. `is_first` is True for the first phase that this process trains."""
        if not (index and is_first):
            return nullcontext()
        return self.keeper.keeping(copies=self.boundary.has_joined)

    def _keeping_within_epoch(self, at: Position) -> AbstractContextManager[None]:
        """Return a context manager for the script's code before the batches of an epoch. It may undo state changes.

        It does so if this process begins in the middle of the epoch: the changes of the epoch's start are made already."""
        return self.keeper.keeping(has_joined=self.boundary.has_joined) if at.cursor else nullcontext()

    def _set_weights(self, step: int) -> None:
        """Weight this rank's gradients by its fraction of the samples of `step`, if the ranks' fractions differ."""
        place = self.boundary.place
        is_even = all(phase.batch % place.shares == 0 for phase in self.plan.phases)
        if not is_even and (self.boundary.live is None or self.sharded):
            weight = self.plan.share_size(step, place.share, place.shares) / self.plan.batch(step)
            for replica in self.replicas:
                replica.set_weight(weight / place.tensor_parallel)  # it adds up the gradients of all ranks
            if self.sharded:
                self.sharded.set_weight(weight * place.shares)

    def while_summing(self) -> None:
        """Write step records, and compute the next sample ids. Called while a backward all-reduces the gradients."""
        self.steps.reach_last_gradient()
        log = self.steps.log
        if self.boundary.live:
            log.write_all()  # a lost rank is not rolled back, so its steps must be recorded
        else:
            log.write_known()
            if self.boundary.ranks.rank == 0:
                log.record.flush()  # for readers of the history: the next step may take long
        self.source.prepare()

    def _step(self, step: int, at: Position, stall: float) -> Iterator[Batch]:
        began = perf_counter()
        self.steps.request()
        request, parts = next(self.source)
        self.steps.begin(step, at, request, parts, perf_counter() - began, stall)
        phase, local = self.plan.phase(step)  # a script counts from 0 in every phase
        at = phase.position(local)
        check = self.first_batch if step == 0 else None
        if check:
            check.begin()
        if len(parts) == 1:
            yield Batch(parts[0], request.ids, 1.0, True, *at, local)
            if check:
                check.check()
        else:
            for batch in self._micro_batches(request.ids, parts, at, local):
                yield batch
                if check:
                    check.check()
        if not self._is_own_process:
            raise BadInput(
                "a process that the script forked inside its loop continues the loop, and only the worker may: end the "
                "forked process with os._exit()."
            )
        self.steps.end()
        if self.unprotected and self.steps.work.stepped >= self.unprotected.next:
            self.unprotected.look(frames_of_script(sys._getframe()), self.steps.work.stepped, step + 1 - self.start)
        if step == 0:
            self.boundary.saves.prepare()  # again: optimizers have made their moments in the first step

    def _micro_batches(self, ids: Ids, parts: list[Any], at: Position, step: int) -> Iterator[Batch]:
        for number, (part, data) in enumerate(zip(divided(len(ids), len(parts)), parts, strict=True), 1):
            is_last = number == len(parts)
            with nullcontext() if is_last else holding_back(self.replicas):
                yield Batch(data, ids[part.start : part.stop], len(part) / len(ids), is_last, *at, step)

    @property
    def _is_own_process(self) -> bool:
        return os.getpid() == self.pid
