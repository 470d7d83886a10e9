"""Build the training loop of a run, when the script asks for its first batch: the plan event, saves, and all checks."""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from holdfast import progress
from holdfast.blocks.division import Ids
from holdfast.checkpoint.writer import Writer
from holdfast.distributed.ranks import BoundaryGate, Ranks
from holdfast.errors import BadInput
from holdfast.events import Order, Plan, Recover
from holdfast.history.tail import last_witness
from holdfast.live.recovery import LiveRecovery
from holdfast.live.settlement import LossEffects
from holdfast.live.sharded.shadow import OwnShards
from holdfast.live.sharded.shard_recovery import ShardedRecovery
from holdfast.live.training_hooks import TrainingHooks
from holdfast.processor_wait import OwnWaits, ProcessorWait
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.sampler.orders import pieces
from holdfast.sampler.plan import LENGTH
from holdfast.sampler.run_plan import RunPlan
from holdfast.train import guards, inject
from holdfast.train.data.dataset import MapDataset, probe
from holdfast.train.data.loader import ShareLoader
from holdfast.train.data.phases import Phases, SampleSource, TrainingPhase, share_key
from holdfast.train.data.stream import OwnSamples, Streamed
from holdfast.train.guards import FirstBatchCheck, StateKeeper
from holdfast.train.inject import Injection
from holdfast.train.loop import Boundary, Loop
from holdfast.train.observe.generators import GeneratorCheck
from holdfast.train.observe.observer import Rehearsal, SavingAt, StepObserver
from holdfast.train.observe.unprotected_state import AFTER_RESUMING, UnprotectedStateCheck
from holdfast.train.replicate import Replica
from holdfast.train.state import restore, rng
from holdfast.train.state.attempt import AttemptContext, MemberRecorder, Recorder
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import RestoredState
from holdfast.train.state.save import CheckpointSaver, Conditions, NoSaver, Saves
from holdfast.train.state.shards import local
from holdfast.train.state.unwrapped_models import uncompiled_key, unwrapped
from holdfast.train.step_log import (
    Fingerprints,
    LoggedLoss,
    RankPlacement,
    StepLog,
    StepRecorder,
    WorkDone,
    clock_of,
)
from holdfast.train.stopping import Stopping
from holdfast.train.whole_digest import replicated_state
from holdfast.train.witness import ComparedState, Witness

if TYPE_CHECKING:
    from holdfast.train.sharded import ShardedModels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopSetup:
    """The objects that the training loop of one rank is built from. The script gave `models` to `run.replicate`."""

    config: RunConfig
    ranks: Ranks
    live: LiveRecovery | None
    attempt: AttemptContext | None
    record: Recorder
    phases: Phases
    protected: Protected
    restored: RestoredState
    models: list[nn.Module]
    replicas: list[Replica]
    writer: Writer | None
    make_writer: Callable[[], Writer]
    loss: LoggedLoss
    rehearsal: Rehearsal | None
    was_stopped: bool  # by the script, in an earlier attempt

    @property
    def number(self) -> int:
        """The number of this attempt (start of all workers), counted from 1."""
        return self.attempt.number if self.attempt else 1

    @property
    def _is_joining(self) -> bool:
        return self.live is not None and self.live.is_joining

    def make(self) -> Loop:
        """Record the plan of the run, and build its training loop. No step is trained yet."""
        phases, protected = self.phases, self.protected
        plan, loads = phases.plan, phases[0].loads
        self._enter_training()
        sharded = _sharded_models(protected, self.live)
        injection = self._make_injection(sharded)
        fingerprint = identity(plan, protected)
        conditions = self._check_conditions(phases)
        if self.attempt:
            self.record.append(
                plan_event(self.config, self.number, phases, fingerprint, conditions, sharded=protected.is_sharded)
            )
            self.record.flush()
        start = self.restored.step or 0
        gate = self.live.coordination.gate if self.live else BoundaryGate()
        saves = self._make_saves(plan, fingerprint, injection, loads, conditions, protected)
        stopping = Stopping(self.ranks, start, gate, wanted=self.was_stopped, on_request=saves.hurry)
        place = RankPlacement(self.ranks.rank, self.ranks.size, self.ranks.tensor_parallel)
        fingerprints = Fingerprints(protected if self.attempt else None)
        log = StepLog(self.record, fingerprints, self.number, place)
        work = WorkDone(self.replicas, protected)
        watcher = self._make_observer(protected, loads.dataset, place)
        waits = OwnWaits(ProcessorWait())
        steps = StepRecorder(log, work, self.loss, self.live, watcher, clock_of(self.ranks.device), waits)
        source = SampleSource(phases, None if place.rank % place.tensor_parallel else self._record_order)
        if self.live:
            self._start_live(self.live, plan, protected, steps, injection)
        return Loop(
            phases=phases,
            plan=plan,
            start=start,
            source=source,
            replicas=self.replicas,
            sharded=sharded,
            steps=steps,
            keeper=StateKeeper(protected, fingerprints, self._restore_again),
            first_batch=FirstBatchCheck(fingerprints, work) if self.attempt else None,
            unprotected=self._make_unprotected_check(protected),
            boundary=Boundary(
                phases=phases,
                plan=plan,
                end=self.rehearsal.end(plan) if self.rehearsal else plan.steps,
                ranks=self.ranks,
                attempt=self.number,
                record=self.record,
                place=place,
                source=source,
                steps=steps,
                saves=saves,
                stopping=stopping,
                gate=gate,
                injection=injection,
                live=self.live,
                witness=self._make_witness(steps),
                recover=functools.partial(self._recover, plan, protected, fingerprints),
            ),
        )

    def _start_live(
        self, live: LiveRecovery, plan: RunPlan, protected: Protected, steps: StepRecorder, injection: Injection | None
    ) -> None:
        assert isinstance(self.record, MemberRecorder)
        live.start(
            TrainingHooks(
                losses=LossEffects(live.strategy, plan),
                protected=protected,
                record=self.record,
                attempt=self.number,
                record_steps=steps.log.write_all,
                inject=injection.strike_in_recovery if injection else _no_failure,
                work=steps.work,
                restore_shard=functools.partial(self._restore_shard, protected),
            )
        )

    def _restore_shard(self, protected: Protected, rank: int, step: int) -> int | None:
        ranks = replace(self.ranks, rank=rank)  # a spare had another number
        return restore.restore_shard(self.attempt, ranks, protected, step) if self.attempt else None

    def _enter_training(self) -> None:
        if not self._is_joining:
            progress.here.phase = Phase.TRAINING
        guards.loop_begins()
        if self.ranks.rank == 0 and self.number == 1:
            if (seed := rng.seeded()) not in (None, self.config.seed):
                logger.warning(
                    "holdfast: torch.manual_seed(%d) after attach() has no effect on the order of samples or on what is "
                    "drawn in the loop, which follow the seed %d of the run: remove it, or write attach(seed=%d) instead.",
                    seed,
                    self.config.seed,
                    seed,
                )
            if not self.attempt:
                logger.warning(
                    "holdfast: nothing is saved, since the run has no folder: give attach(out=...), or start the script "
                    "by `holdfast run`."
                )

    def _make_injection(self, sharded: "ShardedModels | None") -> Injection | None:
        """Return the injector of planned failures, or None if none are planned."""
        if not self.config.failures:
            return None
        inject.check(self.config.failures, self.phases.plan.steps)
        struck = self.attempt.past.struck if self.attempt else ()
        folder = self.attempt.folder if self.attempt else None
        injection = Injection(self.config.failures, self.ranks.rank, self.number, struck, folder, self.ranks)
        injection.watch(self.models, self.replicas, sharded, self.protected)
        return injection

    def _check_conditions(self, phases: Phases) -> Conditions:
        """Return digests of this process's data, and its thread count. Raise BadInput if a snapshot has other data."""
        if self.attempt is None:
            return Conditions.now([None], self.ranks.tensor_parallel)
        now = Conditions.now([data_digest(phases[index]) for index in range(len(phases))], self.ranks.tensor_parallel)
        same_shares = self.restored.has_shares_of(self.ranks)
        now.check(self.restored.conditions, same_shares=same_shares, warns=self.ranks.rank == 0)
        return now

    def _record_order(self, epoch: int, order: Ids) -> None:
        for first, width, indices in pieces(order):
            self.record.append(Order(self.number, epoch, first, width, indices))
        self.record.flush()

    def _recover(
        self, plan: RunPlan, protected: Protected, fingerprints: Fingerprints, start: int, share: int
    ) -> Recover:
        """Seed the random generators for a `share` of step `start`. Return the event that records where this rank begins."""
        restored = self.restored
        if start != (restored.step or 0):
            restored = RestoredState(step=start)  # the state came from another rank
        at = plan.position(start)
        saved = RunPlan.from_json(restored.config) if restored.config else plan
        saved_key = share_key(saved, start, share)
        is_same_share = restored.step is not None and restored.has_shares_of(self.ranks)
        generators = restored.generators[self.ranks.rank] if is_same_share else None
        return Recover(
            attempt=self.number,
            restored=restored.step,
            epoch=at.epoch,
            cursor=at.cursor,
            rng=rng.key_and_compare(share_key(plan, start, share), saved_key, generators),
            seconds=restored.seconds,
            passed_over=restored.passed_over,
            state=None if restored.step is None else restored.digest_in_memory(protected),
            weights=restored.weights,
            built=restored.built,
            fingerprint=fingerprints.take().digest(),
        )

    def _restore_again(self) -> None:
        assert self.attempt is not None
        assert self.protected is not None
        assert self.restored.step is not None
        restore.restore_again(self.attempt, self.ranks, self.restored.step, self.protected)

    def _make_saves(
        self,
        plan: RunPlan,
        fingerprint: str,
        injection: Injection | None,
        loads: ShareLoader,
        conditions: Conditions,
        protected: Protected,
    ) -> Saves:
        if self.attempt is None:
            return NoSaver()
        saver = functools.partial(SavingAt, at=self.rehearsal.saves) if self.rehearsal else CheckpointSaver
        return saver(
            config=self.config,
            attempt=self.attempt,
            ranks=self.ranks,
            writer=self.writer or self.make_writer(),
            protected=protected,
            replicated=[replica.ddp for replica in self.replicas],
            plan=plan,
            fingerprint=fingerprint,
            conditions=conditions,
            position=loads.position,
            injected=injection.strike_in_save if injection else _no_failure,
            saved=self.restored.step,
        )

    def _make_witness(self, steps: StepRecorder) -> Witness | None:
        if self.config.witness_every is None or self.attempt is None:
            return None
        agreed = last_witness(self.attempt.folder, self.ranks.rank) if self._is_joining else self.restored.step
        models, corruption = self.models or self.protected.trained_models, self.attempt.corruption
        return Witness(
            every=self.config.witness_every,
            ranks=self.ranks,
            attempt=self.number,
            record=self.record,
            state=self._compared_state(steps.work),
            weights=lambda: [local(value.detach()) for model in models for value in model.parameters()],
            take_bad_loss=steps.take_bad_loss,
            agreed=agreed,
            diverged=corruption.step if corruption and not corruption.finite else None,
        )

    def _compared_state(self, work: WorkDone) -> Callable[[], ComparedState]:
        """Return a function that returns the tensors of this rank that other ranks also have."""
        live = self.live
        if isinstance(live, ShardedRecovery) and live.strategy == "replay":
            return lambda: ComparedState(*live.compared_state())
        if self.replicas and not self.protected.is_sharded:
            return lambda: ComparedState(replicated_state(self._replicated_parameters(), self._optimizers(work)))
        if (compared := self._shards_with_replicas()) is not None:
            return compared
        raise BadInput(
            "--witness-every compares the copies of a state, and this run has only one: it needs models of run.replicate, or, "
            "for a sharded model, hybrid sharding or --recovery replay over gloo. Leave it out."
        )

    def _shards_with_replicas(self) -> Callable[[], ComparedState] | None:
        """Return a function that returns this rank's shards, or None if no other rank has the same shards."""
        if not self.protected.is_sharded:
            return None
        from holdfast.train.sharded import first_with_same_shards  # a slow import

        own = OwnShards(self.protected)
        first = first_with_same_shards(own.parameters.values())
        return None if first is None else lambda: ComparedState(own.compared(own.capture()), group=first)

    def _replicated_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that have the same values on every rank, by name."""
        names = {id(thing): name for name, thing in self.protected.things.items()}
        return {
            f"{names.get(id(model), f'model {number}')}/{uncompiled_key(name)}": parameter
            for number, model in enumerate(unwrapped(replica.ddp) for replica in self.replicas)
            for name, parameter in model.named_parameters()
            if name not in self.replicas[number].ddp.parameters_to_ignore
        }

    def _optimizers(self, work: WorkDone) -> list[torch.optim.Optimizer]:
        """Return the protected optimizers; if a trainer protects them, those that have stepped."""
        return self.protected.optimizers or work.optimizers

    def _make_unprotected_check(self, protected: Protected) -> UnprotectedStateCheck | None:
        if protected.is_of_trainer:
            return None
        has_resumed = self._is_joining or self.restored.step is not None
        loads = (self.phases[index].loads for index in range(len(self.phases)))
        loaders = [streamed.feed.loader for streamed in loads if isinstance(streamed, Streamed)]
        generators = None if has_resumed or self.ranks.rank else GeneratorCheck(protected, loaders)
        return UnprotectedStateCheck(protected, next=AFTER_RESUMING if has_resumed else 1, generators=generators)

    def _make_observer(self, protected: Protected, dataset: MapDataset, place: RankPlacement) -> StepObserver | None:
        if self.rehearsal is None:
            return None
        if self.models or protected.is_sharded:
            self.rehearsal.note_several_ranks()
        live = self.live
        joined = (lambda: live.coordination.number) if live and live.is_joining else (lambda: 0)
        return StepObserver(self.rehearsal, protected, dataset, lambda: place.rank, self.number, joined)


def _no_failure(step: int) -> None: ...


def _sharded_models(protected: Protected, live: LiveRecovery | None) -> "ShardedModels | None":
    if not protected.is_sharded:
        return None
    from holdfast.train.sharded import ShardedModels  # a slow import

    return ShardedModels(protected.trained_models, live if isinstance(live, ShardedRecovery) else None)


def plan_event(
    config: RunConfig, attempt: int, phases: Phases, fingerprint: str, conditions: Conditions, *, sharded: bool
) -> Plan:
    """Return the event that records how a run trains, saves and compares states.

    `fingerprint` is the digest that `identity` returns, and `sharded` is True if each rank holds a part of the model."""
    first, *later = (_plan_fields(phases[index], data) for index, data in enumerate(conditions.all_data))
    return Plan(
        attempt=attempt,
        save_every=config.save_every,
        writer=config.writer,
        config=fingerprint,
        loader=isinstance(phases[0].loads, Streamed),
        extends=config.extend,
        command=xxhash.xxh3_64_hexdigest(json.dumps(config.args).encode()),
        tensor_parallel=conditions.tensor_parallel,
        later_phases=tuple(later),
        sharded=sharded,
        witness_every=config.witness_every,
        **first,
    )


def data_digest(phase: TrainingPhase) -> str | None:
    """Return a digest of a few samples of the dataset of `phase`; None if the script draws the samples itself."""
    dataset = phase.loads.dataset
    return None if isinstance(dataset, OwnSamples) else probe(dataset, len(dataset), phase.plan.seed)


def _plan_fields(phase: TrainingPhase, data: str | None) -> dict[str, Any]:
    """Return the fields of a plan event for one phase (training loop); `data` is the digest of a few of its samples."""
    fields = {**phase.plan.to_json(), "data": data, "own": isinstance(phase.loads.dataset, OwnSamples)}
    return {name: value for name, value in fields.items() if value is not None and value is not False}


def identity(plan: RunPlan, protected: Protected) -> str:
    """Return a digest of the sample order and the protected objects, to recognise snapshots of this run."""
    first = plan.phases[0].to_json()  # a run may be extended: made longer, or by another phase
    order = {name: value for name, value in first.items() if name not in LENGTH}
    parts = {"geometry": order, "protected": protected.signature()}
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())
