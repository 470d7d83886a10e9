"""This process's part in a run: the state behind `Run`, and the construction of its training loop.

A setup that cannot be trained is refused here, before the first step. The code in this file does not run in every step.
"""

import atexit
import functools
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from holdfast import progress
from holdfast.blocks.division import Ids
from holdfast.checkpoint.payload import flatten
from holdfast.checkpoint.writer import Writer
from holdfast.distributed import ranks as distributed
from holdfast.distributed.ranks import SUPERVISED, BoundaryGate, Ranks
from holdfast.errors import BadInput
from holdfast.events import Order, Recover
from holdfast.live.recovery import LiveRecovery, TrainingHooks, live_for
from holdfast.live.settlement import LossEffects
from holdfast.progress import Phase, restart_needed
from holdfast.runs.config import RunConfig
from holdfast.sampler.orders import pieces
from holdfast.sampler.run_plan import RunPlan
from holdfast.train import inject, loop
from holdfast.train.data.dataset import MapDataset
from holdfast.train.data.loader import ShareLoader
from holdfast.train.data.phases import Phases, SampleSource, TrainingPhase
from holdfast.train.data.requests import share_key
from holdfast.train.data.stream import Streamed
from holdfast.train.guards import FirstBatchCheck, StateKeeper
from holdfast.train.inject import Injection
from holdfast.train.iterators import WAY, LoopTurns, PhaseTurns, Turns
from holdfast.train.loop import Boundary, Loop
from holdfast.train.observe import observer
from holdfast.train.observe.observer import SavingAt, StepObserver
from holdfast.train.observe.unprotected_state import UnprotectedStateCheck
from holdfast.train.plan_events import data_digest, identity, plan_event
from holdfast.train.replicate import Replica
from holdfast.train.script_loops import late_loop
from holdfast.train.state import restore, rng, sharded
from holdfast.train.state.attempt import AttemptContext, MemberRecorder, NoRecorder, Recorder, await_standby, begin
from holdfast.train.state.protected import Protectable, Protected, Value
from holdfast.train.state.restore import RestoredState, SnapshotFetch
from holdfast.train.state.save import CheckpointSaver, Conditions, NoSaver, Saves
from holdfast.train.step_log import Fingerprints, LoggedLoss, RankPlacement, StepLog, StepRecorder, WorkDone, clock_of
from holdfast.train.stopping import Stopping
from holdfast.train.writing import writer_for

logger = logging.getLogger(__name__)
PHASE = "phase"


class Session:
    """The state of this process in a run. `out` is the run's folder, or None if nothing is to be saved."""

    def __init__(self, config: RunConfig, ranks: Ranks, out: str | os.PathLike[str] | None) -> None:
        self.config, self._pid = config, os.getpid()
        self.live = live_for(config, ranks)
        self.ranks = self.live.watch(ranks) if self.live else ranks
        self.attempt: AttemptContext | None = None
        self.record: Recorder = NoRecorder()
        self._fetch: SnapshotFetch | None = None
        self._out, self._is_standby = out, progress.here.is_standby
        if not self._is_standby:
            self._begin_attempt()
        self.protected: Protected | None = None
        self.restored = RestoredState()
        self.loss = LoggedLoss()
        self.stopping: Stopping | None = None
        self._rehearsal = observer.asked()
        self._models: list[nn.Module] = []
        self._replicas: list[Replica] = []
        self._writer: Writer | None = None
        self._loop: Loop | None = None
        self._phases: list[TrainingPhase] = []
        # Weak: the script's iterators alone keep the loop alive.
        self._turns: weakref.ref[LoopTurns] | None = None
        self._generator: weakref.ref[Turns] | None = None
        atexit.register(self.close)

    def _begin_attempt(self) -> None:
        if self._out is not None:
            self.attempt = begin(Path(self._out), self.ranks, self.config)
            self.record = self.attempt.record
            self._fetch = None if self._is_joining else SnapshotFetch(self.attempt, self.ranks)

    @property
    def number(self) -> int:
        """The number of this attempt, from 1."""
        return self.attempt.number if self.attempt else int(os.environ.get("HOLDFAST_ATTEMPT", "1"))

    @property
    def rank(self) -> int:
        """The rank that this process has for life; a spare waits until it has one."""
        return self.live.coordination.await_rank() if self.live else self.ranks.rank

    @property
    def known_rank(self) -> int | None:
        """The rank that this process has for life; None for a spare that replaces no worker yet."""
        return self.live.coordination.rank_for_life if self.live else self.ranks.rank

    @property
    def _is_joining(self) -> bool:
        return self.live is not None and self.live.is_joining

    @property
    def _was_stopped(self) -> bool:
        return self.restored.stopped and not self.config.extend

    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Return `model` wrapped for training with the other ranks; a process without peers gets `model` itself."""
        sharded.refuse({"the model in replicate()": model})
        self._models.append(model)
        if not self.ranks.grouped:
            return model
        self._replicas.append(Replica(model, options, self.live, self._while_summing))
        return cast(nn.Module, self._replicas[-1].ddp)

    def _while_summing(self) -> None:
        if self._loop:
            self._loop.while_summing()

    def protect(self, things: Mapping[str, Protectable | Value]) -> None:
        """Include `things` in every snapshot; restore them from the newest snapshot or the run's initial weights."""
        if self.protected is not None:
            raise BadInput("protect() was called before: name everything in one call.")
        self.protected = Protected(things)
        if self._is_standby:  # until now nothing was read from the run's folder, or written to it
            await_standby()
            self._begin_attempt()
        if self.attempt is None or self._fetch is None:
            return
        with progress.during(Phase.RESTORING):
            self.restored = restore.restore(self._fetch, self.attempt, self.ranks, self.protected)
            self._fetch = None  # frees the snapshot
            if self.config.source and self.restored.step is None:
                from holdfast.weights.initial import load_initial_weights  # few runs need it

                weights = load_initial_weights(self.config.source, self.protected, reports=self.ranks.rank == 0)
                self.restored = replace(self.restored, weights=weights)
        if self.ranks.rank == 0:
            self._writer = writer_for(self.config, self.attempt, self.ranks)
            self._writer.prepare(flatten(self.protected.capture()).tensors)  # in a thread, while the script continues

    @property
    def seed_of_next_phase(self) -> int:
        """The seed of the next loop, unless the script gives one. Two loops over one dataset have different orders."""
        seed, number = self.config.seed or 0, len(self._phases)
        return rng.key(seed, PHASE, number) & 0xFFFFFFFF if number else seed  # 32 bits: what numpy takes as a seed

    def add_phase(self, phase: TrainingPhase) -> PhaseTurns:
        """Add a loop of the script as a phase of the run, and return its part of the turns. Nothing is trained yet."""
        if self.protected is None:
            raise BadInput("call protect() before batches(): it names what is restored after a failure.")
        if self._loop:
            raise BadInput(
                "this loop was made after the run had begun to train, and a run knows its length before it begins. For several "
                "loops, make all of them first (a = run.batches(...); b = run.batches(...)), then iterate over each. If the "
                "first loop is trained already, --extend then continues with the second. For work at the end of epochs write "
                f"{WAY}."
            )
        if self._phases and any(isinstance(loop.loads, Streamed) for loop in (phase, *self._phases)):
            raise BadInput("run.stream must be the only loop of a run: another loop cannot come before or after it.")
        self._check(phase, self.protected)
        start = max(0, (self.restored.step or 0) - sum(before.plan.steps for before in self._phases))
        self._phases.append(phase)
        turns = self._turns() if self._turns else None
        if turns is None:
            turns = LoopTurns(self._begin_loop)
            self._turns = weakref.ref(turns)
        return PhaseTurns(turns, len(self._phases) - 1, phase.plan, min(start, phase.plan.steps))

    def _begin_loop(self) -> tuple[Turns, int]:
        """Build the training loop of all phases; return its turns (no step has begun) and the number of phases."""
        assert self.protected is not None
        self._check_script()
        phases = Phases(self._phases)
        inject.check(self.config.failures, phases.plan.steps)
        if self.attempt:
            restore.check_config(self.attempt.store, self.restored, phases.plan, extend=self.config.extend)
        self._loop = self._make_loop(phases, self.protected)
        turns = self._loop.run()
        self._generator = weakref.ref(turns)
        self._end_if_done(phases.plan, turns)
        return turns, len(phases)

    def _check_script(self) -> None:
        """Raise BadInput if the script would make another loop only after this one is trained."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if main and len(self._phases) == 1 and (line := late_loop(Path(main))) is not None:
            raise BadInput(
                f"the loop in line {line} of {Path(main).name} would be made after the first one is trained, and a run knows its "
                "length before it begins: make all loops first (a = run.batches(...); b = run.batches(...)), then iterate "
                "over each."
            )

    def close(self) -> None:
        """Close the training loop, unless it has ended, then the history and the process group. Also runs at exit."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        try:
            if self._generator and (turns := self._generator()):
                turns.close()
            if self._loop and self._loop.left_in is not None and getattr(sys, "last_value", None) is None:
                logger.warning(
                    "holdfast: the script left its loop in step %d, before the end of the run (step %d), so the run is "
                    "unfinished: the same command resumes it from its newest snapshot. To end a run early, call run.stop() "
                    "and let the loop end by itself, without break or return.",
                    self._loop.left_in,
                    self._loop.plan.steps,
                )
        finally:
            self.record.close()
            distributed.leave()
            if self.attempt and self.attempt.lock:
                self.attempt.lock.release()

    def _check(self, phase: TrainingPhase, protected: Protected) -> None:
        """Raise BadInput, on all ranks alike, if a phase cannot be trained or could not be restored after a failure."""
        sharded.refuse(protected.things)  # again: a script may shard its model after protect()
        for model in self._models:
            protected.check_covers(model)
        protected.check_schedules()
        if self.live:
            protected.check_replicated(self._models)
        least, micro_batches = phase.plan.share_size(0, self.ranks.size), phase.loads.parts
        if not 1 <= micro_batches <= least:
            raise BadInput(
                f"micro_batches must be between 1 and {least}, the samples of one rank and step (got {micro_batches})."
            )
        if self.attempt:
            restore.check_phase(self.attempt.store, self.restored, phase.plan, len(self._phases))

    def _make_loop(self, phases: Phases, protected: Protected) -> Loop:
        plan, loads = phases.plan, phases[0].loads
        self._enter_training()
        injection = self._make_injection()
        fingerprint = identity(plan, protected)
        conditions = self._check_conditions(phases)
        if self.attempt:
            self.record.append(plan_event(self.config, self.number, phases, fingerprint, conditions))
            self.record.flush()
        start = self.restored.step or 0
        gate = self.live.coordination.gate if self.live else BoundaryGate()
        self.stopping = Stopping(self.ranks, start, gate, wanted=self._was_stopped)
        place = RankPlacement(self.ranks.rank, self.ranks.size)
        fingerprints = Fingerprints(protected if self.attempt else None)
        log = StepLog(self.record, fingerprints, self.number, place)
        work = WorkDone(self._replicas, protected)
        watcher = self._make_observer(protected, loads.dataset, place)
        steps = StepRecorder(log, work, self.loss, self.live, watcher, clock_of(self.ranks.device))
        source = SampleSource(phases, self._record_order)
        if self.live:
            self._start_live(self.live, plan, protected, steps, injection)
        return Loop(
            phases=phases,
            plan=plan,
            start=start,
            source=source,
            replicas=self._replicas,
            steps=steps,
            keeper=StateKeeper(protected, fingerprints, self._restore_again),
            first_batch=FirstBatchCheck(fingerprints, work) if self.attempt else None,
            unprotected=self._make_unprotected_check(protected),
            boundary=Boundary(
                phases=phases,
                plan=plan,
                end=self._rehearsal.end(plan) if self._rehearsal else plan.steps,
                ranks=self.ranks,
                attempt=self.number,
                record=self.record,
                place=place,
                source=source,
                steps=steps,
                saves=self._make_saves(plan, fingerprint, injection, loads, conditions, protected),
                stopping=self.stopping,
                gate=gate,
                injection=injection,
                live=self.live,
                recover=functools.partial(self._recover, plan, protected, fingerprints),
            ),
        )

    def _start_live(
        self, live: LiveRecovery, plan: RunPlan, protected: Protected, steps: StepRecorder, injection: Injection
    ) -> None:
        assert isinstance(self.record, MemberRecorder)
        live.start(
            TrainingHooks(
                losses=LossEffects(live.strategy, plan),
                protected=protected,
                record=self.record,
                attempt=self.number,
                record_steps=steps.log.write_all,
                inject=injection.strike_in_recovery,
                has_stepped=lambda: steps.work.has_stepped,
                has_pending_gradients=lambda: steps.work.is_pending,
            )
        )

    def _end_if_done(self, plan: RunPlan, turns: Turns) -> None:
        if self._is_joining or not (self.restored.step == plan.steps or self._was_stopped):
            return
        if self.ranks.rank == 0:
            logger.warning("this run is done at step %d: nothing is left to train", self.restored.step)
        if SUPERVISED in os.environ:
            for _ in turns:
                raise AssertionError("nothing was left to train")
            raise SystemExit(0)

    def _enter_training(self) -> None:
        if not self._is_joining:
            progress.here.enter(Phase.TRAINING)
        loop.begun()
        if self.ranks.rank == 0 and self.number == 1:
            if (seed := rng.seeded()) is not None:
                logger.warning(
                    "holdfast: torch.manual_seed(%d) after attach() has no effect on the order of samples or on what is "
                    "drawn in the loop: call it before attach(), or write attach(seed=%d).",
                    seed,
                    seed,
                )
            if not self.attempt:
                logger.warning(
                    "holdfast: nothing is saved, since the run has no folder: give attach(out=...), or start the script "
                    "by `holdfast run`."
                )

    def _make_injection(self) -> Injection:
        struck = self.attempt.past.struck if self.attempt else ()
        folder = self.attempt.folder if self.attempt else None
        injection = Injection(self.config.failures, self.ranks.rank, self.number, struck, folder, self.ranks)
        injection.watch(self._models, self._replicas)
        return injection

    def _check_conditions(self, phases: Phases) -> Conditions:
        """Return the data digests and thread count of this attempt, after comparing them with those of the snapshot."""
        if self.attempt is None:
            return Conditions.now([None])
        now = Conditions.now([data_digest(phases[index]) for index in range(len(phases))])
        same_world = self.restored.world == self.ranks.size
        now.check(self.restored.conditions, same_world=same_world, warns=self.ranks.rank == 0)
        return now

    def _record_order(self, epoch: int, order: Ids) -> None:
        for first, width, indices in pieces(order):
            self.record.append(Order(self.number, epoch, first, width, indices))
        self.record.flush()

    def _recover(
        self, plan: RunPlan, protected: Protected, fingerprints: Fingerprints, start: int, rank: int
    ) -> Recover:
        """Seed the random generators for step `start`; return the event that describes this rank's initial state."""
        restored = self.restored
        if start != (restored.step or 0):
            restored = RestoredState(step=start)  # the state came from another rank
        at = plan.position(start)
        saved = RunPlan.from_json(restored.config) if restored.config else plan
        saved_key = share_key(saved, start, rank)
        return Recover(
            attempt=self.number,
            restored=restored.step,
            epoch=at.epoch,
            cursor=at.cursor,
            rng=restore.key_generators(share_key(plan, start, rank), saved_key, restored, self.ranks),
            seconds=restored.seconds,
            passed_over=restored.passed_over,
            state=restored.digest_in_memory(protected),
            weights=restored.weights,
            fingerprint=fingerprints.take().digest(),
        )

    def _restore_again(self) -> None:
        if self.attempt is None or self.protected is None or self.restored.step is None:
            raise restart_needed("a script that changes protected state before an epoch's batches cannot join in one")
        restore.restore_again(self.attempt, self.ranks, self.restored.step, self.protected)

    def _make_saves(
        self,
        plan: RunPlan,
        fingerprint: str,
        injection: Injection,
        loads: ShareLoader,
        conditions: Conditions,
        protected: Protected,
    ) -> Saves:
        if self.attempt is None:
            return NoSaver()
        saver = functools.partial(SavingAt, at=self._rehearsal.saves) if self._rehearsal else CheckpointSaver
        return saver(
            config=self.config,
            attempt=self.attempt,
            ranks=self.ranks,
            writer=self._writer,
            make_writer=functools.partial(writer_for, self.config, self.attempt, self.ranks),
            protected=protected,
            plan=plan,
            fingerprint=fingerprint,
            conditions=conditions,
            position=loads.position,
            injected=injection.strike_in_save,
            saved=self.restored.step,
        )

    def _make_unprotected_check(self, protected: Protected) -> UnprotectedStateCheck | None:
        if protected.is_of_trainer:
            return None
        return UnprotectedStateCheck(protected, has_resumed=self._is_joining or self.restored.step is not None)

    def _make_observer(self, protected: Protected, dataset: MapDataset, place: RankPlacement) -> StepObserver | None:
        if self._rehearsal is None:
            return None
        live = self.live
        joined = (lambda: live.coordination.number) if live and live.is_joining else (lambda: 0)
        return StepObserver(self._rehearsal, protected, dataset, lambda: place.rank, self.number, joined)
