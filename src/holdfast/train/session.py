"""This process's part in a run: the state behind `Run`, and the construction of its training loop.

A setup that cannot be trained is refused here, before the first step. The code in this file does not run in every step.
"""

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from holdfast import process, progress
from holdfast.checkpoint import writer as writers
from holdfast.checkpoint.bandwidth import BandwidthLimit
from holdfast.checkpoint.writer import Writer
from holdfast.distributed import ranks as distributed
from holdfast.distributed.ranks import SUPERVISED, Ranks
from holdfast.errors import BadInput
from holdfast.live.set_up import live_for
from holdfast.live.sharded.partial_replacement import KINDS
from holdfast.live.sharded.shard_recovery import ShardedRecovery, check_models, sharded_live
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.sampler.run_plan import RunPlan
from holdfast.train import inject
from holdfast.train.data.phases import Phases, TrainingPhase
from holdfast.train.data.stream import Streamed
from holdfast.train.guards import late_loop
from holdfast.train.iterators import WAY, LoopItems, PhaseItems, SharedLoop
from holdfast.train.loop import Loop
from holdfast.train.loop_setup import LoopSetup
from holdfast.train.observe import observer
from holdfast.train.replicate import Replica
from holdfast.train.state import protect_checks, restore, rng
from holdfast.train.state.attempt import AttemptContext, NoRecorder, Recorder, await_standby, begin
from holdfast.train.state.object_state import Protectable
from holdfast.train.state.plain_values import PlainValue
from holdfast.train.state.protected import Protected
from holdfast.train.state.restore import RestoredState, SnapshotFetch
from holdfast.train.step_log import LoggedLoss
from holdfast.train.stopping import Stopping

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)
PHASE = "phase"


class Session:
    """The state behind a `Run`: settings, ranks, protected objects. `out` is the run's folder; None to save nothing."""

    def __init__(self, config: RunConfig, ranks: Ranks, out: str | os.PathLike[str] | None) -> None:
        self.config, self._pid = config, os.getpid()
        self.live = None if config.recovery == "restart" else live_for(config, ranks)
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
        self._rehearsal = observer.instructions() if observer.REHEARSAL in os.environ else None
        self._models: list[nn.Module] = []
        self._replicas: list[Replica] = []
        self._writer: Writer | None = None
        self._loop: Loop | None = None
        self._phases: list[TrainingPhase] = []
        # Weak: the script's iterators alone keep the loop alive.
        self._shared_loop: weakref.ref[SharedLoop] | None = None
        self._generator: weakref.ref[LoopItems] | None = None
        atexit.register(self.close)

    def _begin_attempt(self) -> None:
        self._began = perf_counter()
        if self._out is not None:
            self.attempt = begin(Path(self._out), self.ranks, self.config)
            self.record = self.attempt.record
            self._fetch = None if self._is_joining else SnapshotFetch(self.attempt)

    @property
    def number(self) -> int:
        """The number of this attempt (start of all workers), counted from 1."""
        return self.attempt.number if self.attempt else int(os.environ.get("HOLDFAST_ATTEMPT", "1"))

    @property
    def rank(self) -> int:
        """The rank that this process keeps for life. A spare waits here until it replaces a lost worker."""
        return self.live.coordination.await_rank() if self.live else self.ranks.rank

    @property
    def known_rank(self) -> int | None:
        """The rank that this process keeps for life; None for a spare that has not replaced a worker yet."""
        return self.live.coordination.rank_for_life if self.live else self.ranks.rank

    @property
    def stopping(self) -> Stopping | None:
        """The object that ends the training loop early at the script's request; None before the loop begins."""
        return self._loop.boundary.stopping if self._loop else None

    @property
    def _is_joining(self) -> bool:
        return self.live is not None and self.live.is_joining

    @property
    def _recovers_replicas(self) -> bool:
        """True if replacements get their state from a worker that holds the whole model, so it cannot be sharded."""
        return self.live is not None and not isinstance(self.live, ShardedRecovery)

    @property
    def has_shards(self) -> bool:
        """True if a protected model is sharded, so that every forward needs all ranks."""
        return self.protected is not None and self.protected.is_sharded

    @property
    def _was_stopped(self) -> bool:
        return self.restored.stopped and not self.config.extend

    def replicate(self, model: nn.Module, options: dict[str, Any]) -> nn.Module:
        """Return `model` wrapped for training with the other ranks; a process without peers gets `model` itself."""
        protect_checks.check_sharding({"the model in replicate()": model}, is_live=True)
        self._models.append(model)
        if not self.ranks.grouped:
            return model
        self._replicas.append(Replica(model, options, self.live, self._while_summing))
        return cast(nn.Module, self._replicas[-1].ddp)

    def make_mesh(self, replicas: int, tensor_parallel: int) -> "DeviceMesh":
        """Return a device mesh over all ranks, for models that are sharded with FSDP2.

        Each of the `replicas` groups of ranks holds the whole model, sharded over the ranks of the group. From then on,
        groups of `tensor_parallel` ranks train the same samples."""
        from holdfast.train.sharded import make_mesh  # a slow import

        if self.live and tensor_parallel > 1:
            raise BadInput(
                f"a model with tensor parallelism cannot recover live: leave out --recovery {self.config.recovery}, so that a "
                "lost worker restarts all of them."
            )
        if self.live and not isinstance(self.live, ShardedRecovery):
            self.live = sharded_live(self.live, self.ranks.backend, KINDS)
        mesh = make_mesh(self.ranks, replicas, tensor_parallel)
        if tensor_parallel > 1:
            self._group_ranks(tensor_parallel)
        return mesh

    def _group_ranks(self, tensor_parallel: int) -> None:
        now = self.ranks.tensor_parallel
        if now not in (1, tensor_parallel):
            raise BadInput(
                f"this run has a mesh with tensor_parallel={now}, and {tensor_parallel} would divide the samples in another "
                "way: give all meshes the same."
            )
        if self.protected is not None and now == 1:
            raise BadInput(
                f"run.device_mesh(tensor_parallel={tensor_parallel}) comes after run.protect, which restores by it: make the "
                "mesh first, then parallelize the model, then protect it."
            )
        self.ranks.group(tensor_parallel)

    def _while_summing(self) -> None:
        if self._loop:
            self._loop.while_summing()

    def protect(self, things: Mapping[str, Protectable | PlainValue]) -> None:
        """Include `things` in every snapshot; restore them from the newest snapshot or the run's initial weights."""
        if self.protected is not None:
            raise BadInput("protect() was called before: name everything in one call.")
        protect_checks.check_sharding(things, is_live=self._recovers_replicas)
        self.protected = Protected(things)
        if self._is_standby:  # until now nothing was read from the run's folder, or written to it
            await_standby()
            self._begin_attempt()
        if self.attempt is None or self._fetch is None:
            return
        built = perf_counter() - self._began
        with progress.during(Phase.RESTORING):
            restored = restore.restore(self._fetch, self.attempt, self.ranks, self.protected)
            self.restored = replace(restored, built=built)
            self._fetch = None  # frees the snapshot
            if self.config.source and self.restored.step is None:
                from holdfast.weights.initial import load_initial_weights  # few runs need it

                rank = self.ranks.rank
                weights = load_initial_weights(self.config.source, self.protected, rank=rank, reports=rank == 0)
                self.restored = replace(self.restored, weights=weights)
        self._writer = self._make_writer()
        replicated, ranks = [replica.ddp for replica in self._replicas], self.ranks
        state = self.protected.divide(replicated, ranks.rank, ranks.size, ranks.tensor_parallel)
        self._writer.prepare(state.parts)  # in a thread, while the script continues

    @property
    def seed_of_next_phase(self) -> int:
        """The default seed of the script's next training loop, which is different for every loop."""
        seed, number = self.config.seed or 0, len(self._phases)
        return rng.key(seed, PHASE, number) & 0xFFFFFFFF if number else seed  # 32 bits: what numpy takes as a seed

    def add_phase(self, phase: TrainingPhase) -> PhaseItems:
        """Add a training loop of the script as a phase of the run, and return its batches. Nothing is trained yet."""
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
        loop = self._shared_loop() if self._shared_loop else None
        if loop is None:
            loop = SharedLoop(self._begin_loop)
            self._shared_loop = weakref.ref(loop)
        return PhaseItems(loop, len(self._phases) - 1, phase.plan, min(start, phase.plan.steps))

    def _begin_loop(self) -> tuple[LoopItems, int]:
        """Build the training loop of all phases; return its generator, not yet started, and the number of phases."""
        assert self.protected is not None
        self._check_script()
        phases = Phases(self._phases)
        if self.attempt and self.restored.config:
            restore.check_length(self.attempt.store, self.restored, phases.plan, extend=self.config.extend)
        self._loop = self._loop_setup(phases, self.protected).make()
        items = self._loop.run()
        self._generator = weakref.ref(items)
        self._end_if_done(phases.plan, items)
        return items, len(phases)

    def _check_script(self) -> None:
        """Raise BadInput if the script creates a second training loop only after the first one is trained."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if main and len(self._phases) == 1 and (line := late_loop(Path(main))) is not None:
            raise BadInput(
                f"the loop in line {line} of {Path(main).name} would be made after the first one is trained, and a run knows its "
                "length before it begins: make all loops first (a = run.batches(...); b = run.batches(...)), then iterate "
                "over each."
            )

    def close(self) -> None:
        """Close the training loop if it has not ended, then the history and the process group. Also runs at exit."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        try:
            if self._generator and (items := self._generator()):
                items.close()
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
        """Raise BadInput if `phase` has impossible settings, or if the `protected` objects could not resume it."""
        protect_checks.check_sharding(protected.things, is_live=self._recovers_replicas)  # again: shards may be new
        for model in self._models:
            protect_checks.check_covers(protected, model)
        if self.ranks.tensor_parallel == 1:
            protect_checks.check_one_split(protected)
        protect_checks.check_schedules(protected)
        if isinstance(self.live, ShardedRecovery):
            check_models(protected.models, self.ranks.size, self.live.strategy)
        elif self.live:
            if self.live.strategy == "partial":
                raise BadInput(
                    "--recovery partial is for models that are sharded with fully_shard(..., mesh=run.mesh), and nothing is "
                    "sharded here: choose --recovery replay, forward or skip for run.replicate, or restart."
                )
            protect_checks.check_replicated(protected, self._models)
        least, micro_batches = phase.plan.share_size(0, self.ranks.shares), phase.loads.parts
        if not 1 <= micro_batches <= least:
            raise BadInput(
                f"micro_batches must be between 1 and {least}, the samples of one rank and step (got {micro_batches})."
            )
        if self.attempt and self.restored.config:
            restore.check_phase(self.attempt.store, self.restored, phase.plan, len(self._phases))

    def _make_writer(self) -> Writer:
        """Return a writer of snapshots that injects the planned storage faults."""
        assert self.attempt is not None
        config, attempt, moves = self.config, self.attempt, progress.here.add_moved
        store = attempt.store
        if config.failures:
            struck, rank = attempt.past.struck, self.ranks.rank
            store = inject.faulty(store, config.failures, attempt.number, struck, attempt.folder, rank)
        if config.writer == "blocking":
            return writers.blocking(store, keep_last=config.keep_last, progress=moves)
        rate = config.save_bandwidth
        return writers.overlapped(
            store,
            keep_last=config.keep_last,
            max_inflight=config.max_inflight,
            progress=moves,
            limit=None if rate is None else BandwidthLimit(rate, process.requested.is_set),
        )

    def _loop_setup(self, phases: Phases, protected: Protected) -> LoopSetup:
        return LoopSetup(
            config=self.config,
            ranks=self.ranks,
            live=self.live,
            attempt=self.attempt,
            record=self.record,
            phases=phases,
            protected=protected,
            restored=self.restored,
            models=self._models,
            replicas=self._replicas,
            writer=self._writer,
            make_writer=self._make_writer,
            loss=self.loss,
            rehearsal=self._rehearsal,
            was_stopped=self._was_stopped,
        )

    def _end_if_done(self, plan: RunPlan, items: LoopItems) -> None:
        if self._is_joining or not (self.restored.step == plan.steps or self._was_stopped):
            return
        if self.ranks.rank == 0:
            logger.warning("this run is done at step %d: nothing is left to train", self.restored.step)
        if SUPERVISED in os.environ:
            for _ in items:
                raise AssertionError("nothing was left to train")
            raise SystemExit(0)
