"""A loop is made ready: from what a script has named and what came back, everything that its boundaries need.

What cannot be trained is refused here, before the first window. Nothing of it is done again in a step.

A digest of a few samples: whether all ranks, in all attempts, train on the same data.

A data set that was split or shuffled without a seed is another one in every process, though it has the same length and
the same sample ids.

What a rank says it is to train, and what makes a snapshot one of this run.
"""

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from holdfast import progress
from holdfast.checkpoint.writer import Writer
from holdfast.distributed.boundary import BoundaryGate
from holdfast.distributed.ranks import SUPERVISED, Ranks
from holdfast.errors import BadInput
from holdfast.events import JSON, Plan, Recover
from holdfast.live.recovery import LiveRecovery, TrainingHooks
from holdfast.live.settlement import Losses
from holdfast.progress import Phase, restart_needed
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import LENGTH, SamplePlan
from holdfast.train import inject, loop_checks
from holdfast.train.data import loader
from holdfast.train.data.loader import Loads, MapDataset
from holdfast.train.data.stream import Draws, Streamed
from holdfast.train.inject import Injection
from holdfast.train.iterators import Turns
from holdfast.train.loop import Keeping, Loop, Loss
from holdfast.train.observe.observer import Rehearsal, SavingAt, StepObserver
from holdfast.train.replicate import Replica
from holdfast.train.seed import UNSAVED, seeded_late
from holdfast.train.state import restore, rng
from holdfast.train.state.attempt import AttemptContext, Enrolled, Recorder
from holdfast.train.state.fingerprint import Fingerprints
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import RestoredState
from holdfast.train.state.save import CheckpointSaver, Saves, Unsaved
from holdfast.train.state.snapshot_extra import Conditions
from holdfast.train.step_log import Effort, Place, Reporting
from holdfast.train.stopping import Stopping
from holdfast.train.writing import writer_for

PROBES = 4
PROBE = "probe"


def probe(dataset: MapDataset, count: int, seed: int) -> str:
    """The digest of a few samples, spread over the data set; random augmentation draws the same numbers each time."""
    hasher = xxhash.xxh3_64()
    for index in sorted({i * (count - 1) // (PROBES - 1) for i in range(PROBES)}):
        rng.set_all(rng.key(seed, PROBE, index))
        _add(hasher, dataset[index])
    return str(hasher.hexdigest())


def _add(hasher: Any, value: Any) -> None:
    """Add what a sample holds: numbers, text, arrays and tensors, nested in any way; of anything else its type."""
    hasher.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        for key, item in value.items():
            hasher.update(str(key).encode())
            _add(hasher, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(hasher, item)
    elif isinstance(value, np.ndarray | np.generic):
        hasher.update(repr((value.dtype.str, value.shape)).encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bytes | str):
        hasher.update(value if isinstance(value, bytes) else value.encode())
    elif isinstance(value, int | float | complex | None):
        hasher.update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # an image
        hasher.update(value.tobytes())


def plan(
    config: RunConfig, attempt: int, geometry: SamplePlan, fingerprint: str, shares: Loads, data: str | None
) -> Plan:
    """What is to be done in this attempt."""
    return Plan(
        attempt=attempt,
        samples=geometry.samples,
        batch=geometry.batch,
        epochs=geometry.epochs,
        seed=geometry.seed,
        save_every=config.save_every,
        writer=config.writer,
        config=fingerprint,
        data=data,
        own=isinstance(shares.dataset, Draws),
        loader=isinstance(shares, Streamed),
        limit=geometry.limit,
        extends=config.extend,
        command=xxhash.xxh3_64_hexdigest(json.dumps(config.args).encode()),
    )


def data_digest(geometry: SamplePlan, shares: Loads) -> str | None:
    """A digest of a few samples; none where the script draws them itself."""
    return None if isinstance(shares.dataset, Draws) else probe(shares.dataset, geometry.samples, geometry.seed)


def identity(geometry: SamplePlan, protected: Protected) -> str:
    """A digest of what makes a snapshot this run's: the geometry, and what the protected things are."""
    order = {name: value for name, value in geometry.to_json().items() if name not in LENGTH}  # a run may be extended
    told: Mapping[str, JSON] = {"geometry": order, "protected": protected.signature()}
    return xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True).encode())


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preparing:
    """What a rank has when its script asks for its loop."""

    config: RunConfig
    world: Ranks
    attempt: AttemptContext | None
    record: Recorder
    rehearsal: Rehearsal | None
    live: LiveRecovery | None
    models: list[nn.Module]
    replicas: list[Replica]
    protected: Protected
    restored: RestoredState
    writer: Writer | None
    loss: Loss

    def loop(self, shares: Loads, geometry: SamplePlan, options: Mapping[str, Any], *, by_epoch: bool) -> Loop:
        """The loop over this plan, which is yet to begin."""
        self._check_named()
        self._start()
        self._check(geometry, shares.parts)
        injection = self._injection()
        start = self.restored.step or 0
        fingerprint = identity(geometry, self.protected)
        conditions = self._conditions(geometry, shares)
        self._plan(geometry, fingerprint, shares, conditions.data)
        fingerprints = Fingerprints(self.protected if self.attempt else None)
        part = Place(self.world.rank, self.world.size)
        turn = self.live.coordination.gate if self.live else BoundaryGate()
        loop = Loop(
            geometry=geometry,
            start=start,
            end=self.rehearsal.end(geometry) if self.rehearsal else geometry.steps,
            world=self.world,
            attempt=self._number,
            record=self.record,
            recover=lambda start, rank: self._recover(start, rank, geometry, fingerprints),
            reporting=Reporting(self.record, fingerprints, self._number, part),
            effort=Effort(self.replicas, self.protected),
            saves=self._saves(geometry, fingerprint, injection, shares, conditions),
            turn=turn,
            stopping=Stopping(self.world, start, turn, wanted=self._was_stopped),
            injection=injection,
            loss=self.loss,
            replicas=self.replicas,
            source=loader.SampleSource(shares, geometry, options),
            part=part,
            live=self.live,
            by_epoch=by_epoch,
            keeping=Keeping(self.protected, fingerprints, self._put_back),
            watch=self._watch(shares.dataset),
        )
        if self.live:
            self._start_live(self.live, loop)
        return loop

    def _start_live(self, live: LiveRecovery, loop: Loop) -> None:
        assert isinstance(self.record, Enrolled)
        live.start(
            TrainingHooks(
                losses=Losses(live.strategy, loop.geometry),
                protected=self.protected,
                record=self.record,
                attempt=self._number,
                record_steps=loop.reporting.settle,
                inject=loop.injection.strike_in_recovery,
                has_pending_gradients=lambda: loop.effort.is_pending,
            )
        )

    def end_if_done(self, geometry: SamplePlan, turns: Turns) -> None:
        """Say that a run is done of which nothing is left to train; under a supervisor, end.

        Scripts expect that their loop has had a turn when it ends.
        """
        if self._is_done(geometry) and SUPERVISED in os.environ:
            for _ in turns:
                raise AssertionError("nothing was left to train")
            raise SystemExit(0)

    @property
    def _number(self) -> int:
        return self.attempt.number if self.attempt else 1

    @property
    def _joins(self) -> bool:
        """Whether this rank takes the place of one that was lost."""
        return self.live is not None and self.live.is_joining

    @property
    def _was_stopped(self) -> bool:
        """Whether what came back is where the script had stopped the run, for good."""
        return self.restored.stopped and not self.config.extend

    def _is_done(self, geometry: SamplePlan) -> bool:
        """Whether nothing of this plan is left to train."""
        if self._joins:
            return False
        at_end = self.restored.step == geometry.steps or self._was_stopped
        if at_end and self.world.rank == 0:
            logger.warning("this run is done at step %d: nothing is left to train", self.restored.step)
        return at_end

    def _check_named(self) -> None:
        """Refuse to train what would not come back as it was."""
        for model in self.models:
            self.protected.check_covers(model)
        self.protected.check_schedules()
        if self.live:
            self.protected.check_replicated(self.models)

    def _start(self) -> None:
        """The steps from here on are those of the run; say what the script may not expect of it."""
        if not self._joins:
            progress.here.enter(Phase.TRAINING)
        loop_checks.begun()
        if self.world.rank == 0 and self._number == 1:
            for line in (seeded_late(rng.seeded()), None if self.attempt else UNSAVED):
                if line:
                    logger.warning("%s", line)

    def _check(self, geometry: SamplePlan, micro_batches: int) -> None:
        """Refuse what cannot be trained; all ranks refuse alike."""
        rank, size = self.world.rank, self.world.size
        least = geometry.share_size(0, size)
        if not 1 <= micro_batches <= least:
            raise BadInput(
                f"micro_batches must be between 1 and {least}, the samples of one rank and step (got {micro_batches})."
            )
        inject.check(self.config.failures, geometry.steps)
        if self.attempt:
            restore.check_config(self.attempt.store, self.restored, geometry, extend=self.config.extend)
        if self.live:
            return
        share = geometry.share_size(rank, size)
        for replica in self.replicas:
            replica.weight = share / geometry.batch

    def _injection(self) -> Injection:
        struck = self.attempt.past.struck if self.attempt else ()
        folder = self.attempt.folder if self.attempt else None
        injection = Injection(self.config.failures, self.world.rank, self._number, struck, folder, self.world)
        injection.watch(self.models, self.replicas)
        return injection

    def _conditions(self, geometry: SamplePlan, shares: Loads) -> Conditions:
        """What bits depend on beside the state, compared with what it was when that was saved."""
        if self.attempt is None:
            return Conditions.now(None)
        now = Conditions.now(data_digest(geometry, shares))
        same_world = self.restored.world == self.world.size
        now.check(self.restored.conditions, same_world=same_world, warns=self.world.rank == 0)
        return now

    def _plan(self, geometry: SamplePlan, fingerprint: str, shares: Loads, data: str | None) -> None:
        """Say what is to be done."""
        if self.attempt:
            self.record.append(plan(self.config, self._number, geometry, fingerprint, shares, data))
            self.record.flush()

    def _recover(self, start: int, rank: int, geometry: SamplePlan, fingerprints: Fingerprints) -> Recover:
        """What the first step begins with."""
        restored = self.restored
        if start != (restored.step or 0):
            restored = RestoredState(step=start)  # by another rank's state
        at = geometry.position(start)
        key = loader.share_key(geometry, at, rank)
        return Recover(
            attempt=self._number,
            restored=restored.step,
            epoch=at.epoch,
            cursor=at.cursor,
            rng=restore.key_generators(key, restored, self.world),
            seconds=restored.seconds,
            passed_over=restored.passed_over,
            state=restored.digest_in_memory(self.protected),
            weights=restored.weights,
            fingerprint=fingerprints.take().digest(),
        )

    def _put_back(self) -> None:
        """What is protected is again as it came back."""
        if self.attempt is None or self.restored.step is None:
            raise restart_needed("a script that changes what is protected before an epoch's batches cannot join in one")
        restore.restore_again(self.attempt, self.world, self.restored.step, self.protected)

    def _saves(
        self, geometry: SamplePlan, fingerprint: str, injection: Injection, shares: Loads, conditions: Conditions
    ) -> Saves:
        if self.attempt is None:
            return Unsaved()
        saving = functools.partial(SavingAt, at=self.rehearsal.saves) if self.rehearsal else CheckpointSaver
        return saving(
            config=self.config,
            attempt=self.attempt,
            ranks=self.world,
            writer=self.writer,
            make_writer=functools.partial(writer_for, self.config, self.attempt, self.world),
            protected=self.protected,
            plan=geometry,
            fingerprint=fingerprint,
            conditions=conditions,
            position=shares.position,
            injected=injection.strike_in_save,
            saved=self.restored.step,
        )

    def _watch(self, dataset: MapDataset) -> StepObserver | None:
        if self.rehearsal is None:
            return None
        return StepObserver(self.rehearsal, self.protected, dataset, self.world.rank, self._number)
