"""The run that a training script belongs to: what `holdfast.attach()` gives, and what a script says to it."""

import atexit
import functools
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import default_collate

from holdfast import progress
from holdfast.checkpoint.writer import Writer
from holdfast.ddp import (
    generators,
    inject,
    loader_options,
    loading,
    outside,
    planning,
    rehearsed,
    restoring,
    whence,
    world,
)
from holdfast.ddp.ahead import WAY
from holdfast.ddp.asked_for import UNSAVED, seeded_late
from holdfast.ddp.attempt import begin
from holdfast.ddp.batches import Loop, Loss
from holdfast.ddp.conditions import Conditions
from holdfast.ddp.config import RunConfig
from holdfast.ddp.draws import LONG, Draws
from holdfast.ddp.effort import Effort
from holdfast.ddp.epochs import Batches, Course, Epochs, Turns, within_a_loop
from holdfast.ddp.fingerprint import Fingerprints
from holdfast.ddp.going_live import live_for
from holdfast.ddp.inject import Injection
from holdfast.ddp.keeping import Keeping
from holdfast.ddp.live import fallen_back
from holdfast.ddp.loading import Collate, Dataset, Loads, Shares
from holdfast.ddp.protected import Protectable, Protected, Value
from holdfast.ddp.record import Enrolled, Record, Unrecorded
from holdfast.ddp.rehearsed import SavingAt, Unwatched, Watch
from holdfast.ddp.replica import Replica
from holdfast.ddp.reporting import Part, Reporting
from holdfast.ddp.restoring import Restored
from holdfast.ddp.saving import Saves, Saving, Unsaved
from holdfast.ddp.shard import Shard
from holdfast.ddp.stopping import Stopping
from holdfast.ddp.stream import Feed, Loader, Streamed
from holdfast.ddp.together import Together
from holdfast.ddp.unwrapping import unwrapped
from holdfast.ddp.world import World
from holdfast.ddp.writing import writer_for
from holdfast.errors import BadInput
from holdfast.events import Recover
from holdfast.geometry import Geometry
from holdfast.progress import Phase
from holdfast.state import flatten

if TYPE_CHECKING:
    from holdfast.advice.advice import Advice

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


class Run:
    """This process's part in a run. `attach` makes one."""

    def __init__(self, config: RunConfig, peers: World, out: str | os.PathLike[str] | None) -> None:
        self._config, self._world, self._pid = config, peers, os.getpid()
        self._rehearsal = rehearsed.asked()
        self._live = live_for(config, peers)
        self._attempt = None if out is None else begin(Path(out), peers, config)
        self._record: Record = self._attempt.record if self._attempt else Unrecorded()
        if self._live and isinstance(self._record, Enrolled):
            self._live.record, self._live.attempt = self._record, self.attempt
        self._models: list[nn.Module] = []
        self._replicas: list[Replica] = []
        self._protected: Protected | None = None
        self._writer: Writer | None = None
        self._restored = Restored()
        self._loss = Loss()
        self._together = Together(peers, self._live)
        self._loop: weakref.ref[Turns] | None = None
        self._stopping: Stopping | None = None
        self._in_a_loop = whence.in_a_loop()  # then one loop of it is one run
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """The number of this process among those that train together, from 0."""
        return self._world.rank

    @property
    def main(self) -> bool:
        """Whether this process is rank 0: the one to print, log and upload."""
        return self.rank == 0

    @property
    def world(self) -> int:
        """How many processes train together."""
        return self._world.size

    @property
    def device(self) -> torch.device:
        """Where this rank's model and batches belong."""
        return self._world.device

    @property
    def seed(self) -> int:
        """What the order of samples and all that is random come from."""
        return self._config.seed or 0

    @property
    def attempt(self) -> int:
        """How often the run was started in its folder, this time included."""
        return self._attempt.number if self._attempt else 1

    @property
    def is_live(self) -> bool:
        """Whether the others go on where one is lost, instead of a restart of all."""
        return self._live is not None

    def replicate(self, model: Model, **options: object) -> Model:
        """The model with rank 0's weights everywhere, and its gradients averaged over the window by every backward.

        A loss is the mean over a batch, as PyTorch's are. The model is wrapped in torch's DistributedDataParallel,
        which gets the options; alone, it is the model itself.
        """
        self._models.append(model)
        if not self._world.grouped:
            return model
        self._replicas.append(Replica(model, options, self._live))
        return cast(Model, self._replicas[-1].ddp)

    def protect(self, **things: Protectable | Value) -> None:
        """Name what comes back after a failure, and on a resume put it back here. Generators and position always do.

        Beside what has a state_dict, dicts and lists of plain values are taken, and tensors: they are put back in place,
        on every rank what it had. With live recovery a rank that replaces a lost one gets those of another.
        """
        if self._protected is not None:
            raise BadInput("protect() was called before: name everything in one call")
        self._protected = Protected(things)
        if self._live:
            self._live.protected = self._protected
        if self._attempt and not (self._live and self._live.joins):
            with progress.during(Phase.RESTORING):
                self._restored = restoring.restore(self._attempt, self._world, self._protected)
                self._begin()
            if self.rank == 0:
                self._writer = writer_for(self._config, self._attempt, self._world)
                self._writer.prepare(flatten(self._protected.capture()).tensors)  # while the script goes on

    def batches(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        accumulate: int = 1,
        workers: int = 0,
        collate: Collate = default_collate,
        loader: Mapping[str, Any] | None = None,
    ) -> Batches:
        """Every window that is still to be trained, this rank's share of it at a time; `next` is the step boundary.

        `global_batch` samples a step, whatever the number of ranks, for so many `epochs`, or so many `steps`.
        `accumulate` hands out a share in so many micro-batches, and gradients are exchanged in the last one. `workers`
        processes load ahead; `loader` has further options for their DataLoader, such as {"prefetch_factor": 4}.
        """
        plan = self._planned(dataset, global_batch, epochs, steps, seed)
        options = loader_options.checked(workers, loader)
        return Batches(*self._prepare(Shares(dataset, accumulate, collate), plan, options, by_epoch=False))

    def epochs(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        accumulate: int = 1,
        workers: int = 0,
        collate: Collate = default_collate,
        loader: Mapping[str, Any] | None = None,
    ) -> Epochs:
        """Every epoch that is still to be trained; an epoch is iterated over as `batches` are, and takes what they take.

        What the script does after the batches of an epoch belongs to it: the boundary, and with it a save, comes when
        the next epoch is asked for. A run that goes on in the middle of an epoch hands out the rest of it.
        """
        plan = self._planned(dataset, global_batch, epochs, steps, seed)
        options = loader_options.checked(workers, loader)
        return Epochs(*self._prepare(Shares(dataset, accumulate, collate), plan, options, by_epoch=True))

    def stop(self) -> None:
        """End the run in order, at the next boundary: its state is saved, and the loop hands out nothing more.

        One rank may call it for all. Called after the batches of an epoch, it ends the run with that epoch.
        """
        if self._stopping is None:
            raise BadInput("stop() came before batches() or epochs(): there is no loop to be ended yet")
        self._stopping.wanted = True

    def _planned(
        self, dataset: Dataset, global_batch: int, epochs: int | None, steps: int | None, seed: int | None
    ) -> Geometry:
        return Geometry.planned(
            samples=loading.size(dataset),
            batch=global_batch,
            epochs=epochs,
            steps=steps,
            seed=self.seed if seed is None else seed,
        )

    def _prepare(
        self, shares: Loads, geometry: Geometry, options: Mapping[str, Any], *, by_epoch: bool
    ) -> tuple[Course, Turns]:
        """The loop over this plan, which is yet to begin."""
        protected = self._start()
        self._check(geometry, shares.parts)
        injection = self._injection()
        start = self._restored.step or 0
        fingerprint = planning.identity(geometry, protected)
        conditions = self._conditions(geometry, shares)
        self._plan(geometry, fingerprint, shares, conditions.data)
        fingerprints = Fingerprints(protected if self._attempt else None)
        part = Part(self._world.rank, self._world.size)
        self._stopping = Stopping(self._world, start, wanted=self._restored.stopped and not self._config.extend)
        loop = Loop(
            geometry=geometry,
            start=start,
            end=self._rehearsal.end(geometry) if self._rehearsal else geometry.steps,
            world=self._world,
            attempt=self.attempt,
            record=self._record,
            recover=lambda start, rank: self._recover(start, rank, geometry, protected, fingerprints),
            reporting=Reporting(self._record, fingerprints, self.attempt, part),
            effort=Effort(self._replicas, protected),
            saves=self._saves(geometry, protected, fingerprint, injection, shares, conditions),
            stopping=self._stopping,
            injection=injection,
            loss=self._loss,
            replicas=self._replicas,
            source=loading.Source(shares, geometry, options),
            part=part,
            live=self._live,
            by_epoch=by_epoch,
            keeping=Keeping(protected, fingerprints, self._put_back),
            watch=self._watch(protected, shares.dataset),
        )
        for replica in self._replicas:
            replica.meanwhile = loop.meanwhile
        if self._live:
            self._live.settle = loop.reporting.settle
            self._live.injected = injection.recovers
            self._live.is_pending = lambda: loop.effort.is_pending
        turns = loop.run()
        if self._is_done(geometry) and world.SUPERVISED in os.environ:
            self._end_at_once(turns)
        self._loop = weakref.ref(turns)  # weak: to leave the loop is to end it
        return Course(shares.dataset, geometry, shares.parts, start, self._in_a_loop), turns

    def draws(self, steps: int, *, global_batch: int, accumulate: int = 1) -> Batches:
        """So many windows whose samples the script draws itself: as many as `batch.data` says, of `global_batch` in all.

        It draws from torch's, numpy's or Python's own generators, in the window that it is for: they are keyed for it, so
        after a failure the same are drawn, by as many ranks. The audit counts them, and cannot say which they were.
        """
        samples = Draws(global_batch * LONG)
        return self.batches(samples, global_batch=global_batch, steps=steps, accumulate=accumulate, collate=len)

    def stream(self, loader: Loader, *, steps: int, accumulate: int = 1) -> Batches:
        """So many steps fed by a loader of this rank's own with `state_dict` and `load_state_dict`, a batch of it each.

        Where the loader is comes back after a failure, on every rank its own, so the number of ranks stays. Give each
        rank its part of the data, and leave the loader out of `protect`. Where it ends it is iterated over anew; if it,
        its sampler or its data set has `set_epoch`, that is called before. `accumulate` takes so many batches a step.
        All batches count alike, of whatever size. The audit counts them, and cannot say which samples they hold.
        """
        if self._live:
            raise BadInput(
                "run.stream goes with --recovery restart alone: where the loader of a lost rank was, no other rank knows"
            )
        if self._protected and any(thing is loader for thing in self._protected.things.values()):
            raise BadInput("run.stream saves where its loader is, for every rank: leave the loader out of protect()")
        feed, batches = Feed(loader), self.world * accumulate
        feed.go_on(self._restored, self.rank, self.world)
        if self.main and self.attempt == 1 and feed.caveat:
            logger.warning("%s", feed.caveat)
        counted = Draws(batches * LONG)
        plan = self._planned(counted, batches, None, steps, None)
        return Batches(*self._prepare(Streamed(counted, accumulate, feed), plan, {"num_workers": 0}, by_epoch=False))

    def note(self, *, loss: float) -> None:
        """Put the loss of the step that is being trained on record."""
        self._loss.note(loss)

    def shard(self, dataset: Dataset) -> Shard:
        """This rank's part of a data set that is evaluated, itself a data set; the parts of all ranks are the whole.

        Parts may differ in size by one: bring results together by `run.sum`, or by `run.mean` with how many each is of.
        """
        return Shard(dataset, self._together.place)

    def sum(self, value: Any) -> Any:
        """The sum of a number, a tensor or a structure of them over all ranks, on every rank; all ranks must call it."""
        return self._together.sum(value)

    def mean(self, value: Any, weight: float = 1.0) -> Any:
        """The mean over all ranks, on every rank, each counting by its weight: of how many samples its value is.

        All ranks must call it. A rank without samples has the weight 0, and then its value, such as nan, counts nothing.
        """
        return self._together.mean(value, weight)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 alone, with the options of Python's own; it is seen at once, unless `flush` is false."""
        if self.main:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def advise(self, **asked: Any) -> "Advice":
        """Which recovery to choose and how often to save, by this run's own history so far; `print` it to read why.

        Takes what `advice.question.Question` does, such as mtbf="4h". It reads the whole history: ask seldom.
        """
        from holdfast.advice.asking import advise_so_far  # few runs need it

        return advise_so_far(self._record, self._attempt.folder if self._attempt else None, **asked)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module as the script made it, without what `replicate` and torch.compile have put around it."""
        return unwrapped(model)

    def close(self) -> None:
        """End the loop if it goes on, close the record, part from the peers: done at exit, if not before."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        try:
            if self._loop and (loop := self._loop()):
                loop.close()
        finally:
            self._record.close()
            world.leave()
            if self._attempt and self._attempt.lock:
                self._attempt.lock.release()

    def _begin(self) -> None:
        """Where nothing came back, begin with the weights that the run was started with, if it was."""
        if self._config.source and self._restored.step is None and self._protected:
            from holdfast.exchange.taking import take  # few runs need it

            weights = take(self._config.source, self._protected, tells=self.rank == 0)
            self._restored = replace(self._restored, weights=weights)

    def _is_done(self, geometry: Geometry) -> bool:
        """Whether nothing of this plan is left to train."""
        if self._live and self._live.joins:
            return False
        at_end = self._restored.step == geometry.steps or (self._restored.stopped and not self._config.extend)
        if at_end and self.rank == 0:
            logger.warning("this run is done at step %d: nothing is left to train", self._restored.step)
        return at_end

    def _end_at_once(self, turns: Turns) -> None:
        """Say that the run is done, and end: scripts expect that their loop has had a turn when it ends."""
        for _ in turns:
            raise AssertionError("nothing was left to train")
        raise SystemExit(0)

    def _put_back(self) -> None:
        """What is protected is again as it came back."""
        if self._attempt is None or self._protected is None or self._restored.step is None:
            raise fallen_back("a script that changes what is protected before an epoch's batches cannot join in one")
        restoring.put_back(self._attempt, self._world, self._restored.step, self._protected)

    def _start(self) -> Protected:
        if self._protected is None:
            raise BadInput("batches() came before protect(): first name what is to come back after a failure")
        if self._loop:
            raise BadInput(f"batches() was called before, and a run has one loop, over all its epochs: write {WAY}")
        if whence.in_a_loop() and not self._in_a_loop:
            raise within_a_loop("run.batches(...)")
        for model in self._models:
            self._protected.check_covers(model)
        self._protected.check_schedules()
        if self._live:
            self._protected.check_replicated(self._models)
        if not (self._live and self._live.joins):
            progress.here.enters(Phase.TRAINING)
        outside.begun()
        if self.main and self.attempt == 1:
            for line in (seeded_late(generators.seeded()), None if self._attempt else UNSAVED):
                if line:
                    logger.warning("%s", line)
        return self._protected

    def _check(self, geometry: Geometry, accumulate: int) -> None:
        """Refuse what cannot be trained; all ranks refuse alike."""
        least = geometry.share_size(0, self.world)
        if not 1 <= accumulate <= least:
            raise BadInput(f"{least} samples a rank cannot be accumulated in {accumulate} parts: give 1 to {least}")
        inject.check(self._config.failures, geometry.steps)
        if self._attempt:
            restoring.check_config(self._attempt.store, self._restored, geometry, extend=self._config.extend)
        if self._live:
            self._live.weigh(geometry)
            return
        share = geometry.share_size(self.rank, self.world)
        for replica in self._replicas:
            replica.weight = share / geometry.batch

    def _conditions(self, geometry: Geometry, shares: Loads) -> Conditions:
        """What bits depend on beside the state, compared with what it was when that was saved."""
        if self._attempt is None:
            return Conditions.now(None)
        now = Conditions.now(planning.data_digest(geometry, shares))
        same_world = self._restored.world == self._world.size
        now.check(self._restored.conditions, same_world=same_world, tells=self.main)
        return now

    def _plan(self, geometry: Geometry, fingerprint: str, shares: Loads, data: str | None) -> None:
        """Say what is to be done."""
        if self._attempt:
            self._record.append(planning.plan(self._config, self.attempt, geometry, fingerprint, shares, data))
            self._record.flush()

    def _recover(
        self, start: int, rank: int, geometry: Geometry, protected: Protected, fingerprints: Fingerprints
    ) -> Recover:
        """What the first step begins with."""
        restored = self._restored
        if start != (restored.step or 0):
            restored = Restored(step=start)  # by another rank's state
        at = geometry.position(start)
        key = loading.share_key(geometry, at, rank)
        return Recover(
            attempt=self.attempt,
            restored=restored.step,
            epoch=at.epoch,
            cursor=at.cursor,
            rng=restoring.key_generators(key, restored, self._world),
            seconds=restored.seconds,
            passed_over=restored.passed_over,
            state=restored.state(protected),
            weights=restored.weights,
            fingerprint=fingerprints.take().digest(),
        )

    def _saves(
        self,
        geometry: Geometry,
        protected: Protected,
        fingerprint: str,
        injection: Injection,
        shares: Loads,
        conditions: Conditions,
    ) -> Saves:
        if self._attempt is None:
            return Unsaved()
        saving = functools.partial(SavingAt, at=self._rehearsal.saves) if self._rehearsal else Saving
        return saving(
            world=self._world,
            writer=self._writer,
            word=self._config.writer,
            every=self._config.save_every,
            record=self._record,
            attempt=self.attempt,
            protected=protected,
            config=geometry.to_json(),
            conditions=conditions,
            fingerprint=fingerprint,
            saved=self._restored.step,
            make_writer=functools.partial(writer_for, self._config, self._attempt, self._world),
            position=shares.position,
            injected=injection.saves,
        )

    def _watch(self, protected: Protected, dataset: Dataset) -> Unwatched:
        if self._rehearsal is None:
            return Unwatched()
        return Watch(self._rehearsal, protected, dataset, self.rank, self.attempt)

    def _injection(self) -> Injection:
        struck = self._attempt.past.struck if self._attempt else ()
        folder = self._attempt.folder if self._attempt else None
        injection = Injection(self._config.failures, self.rank, self.attempt, struck, folder, self._world)
        injection.watch(self._models, self._replicas)
        return injection
