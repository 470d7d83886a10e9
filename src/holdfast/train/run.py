"""The run that a training script belongs to: what `holdfast.attach()` gives, and what a script says to it."""

import atexit
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
from holdfast.checkpoint.state_tree import flatten
from holdfast.checkpoint.writer import Writer
from holdfast.distributed import ranks
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput
from holdfast.live.recovery import live_for
from holdfast.progress import Phase
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import SamplePlan
from holdfast.train import loop_checks
from holdfast.train.data import loader as loader_options
from holdfast.train.data import loader as loading
from holdfast.train.data.loader import Collate, Loads, MapDataset, Shares
from holdfast.train.data.stream import LONG, Draws, Feed, Loader, Streamed
from holdfast.train.evaluation import DatasetShard, Together
from holdfast.train.iterators import Batches, Course, Epochs, Turns, within_a_loop
from holdfast.train.loop import Loop, Loss
from holdfast.train.loop_checks import WAY
from holdfast.train.observe import observer
from holdfast.train.replicate import Replica
from holdfast.train.setup import Preparing
from holdfast.train.state import restore
from holdfast.train.state.attempt import Recorder, Unrecorded, begin
from holdfast.train.state.module_names import unwrapped
from holdfast.train.state.protected import Protectable, Protected, Value
from holdfast.train.state.restore import RestoredState
from holdfast.train.stopping import Stopping
from holdfast.train.writing import writer_for

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


class Run:
    """This process's part in a run. `attach` makes one."""

    def __init__(self, config: RunConfig, peers: Ranks, out: str | os.PathLike[str] | None) -> None:
        self._config, self._pid = config, os.getpid()
        self._rehearsal = observer.asked()
        self._live = live_for(config, peers)
        self._world = self._live.watch(peers) if self._live else peers
        self._attempt = None if out is None else begin(Path(out), self._world, config)
        self._record: Recorder = self._attempt.record if self._attempt else Unrecorded()
        self._models: list[nn.Module] = []
        self._replicas: list[Replica] = []
        self._protected: Protected | None = None
        self._writer: Writer | None = None
        self._restored = RestoredState()
        self._loss = Loss()
        self._together = Together(self._world, self._live)
        self._loop: weakref.ref[Turns] | None = None
        self._training: Loop | None = None
        self._stopping: Stopping | None = None
        self._in_a_loop = loop_checks.in_a_loop()  # then one loop of it is one run
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """The number of this process among those that train together, from 0."""
        return self._world.rank

    @property
    def is_main(self) -> bool:
        """True on rank 0, the process that prints, logs and uploads."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
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
        self._replicas.append(Replica(model, options, self._live, self._while_summing))
        return cast(Model, self._replicas[-1].ddp)

    def protect(self, **things: Protectable | Value) -> None:
        """Name what comes back after a failure, and on a resume put it back here. Generators and position always do.

        Beside what has a state_dict, dicts and lists of plain values are taken, and tensors: they are put back in place,
        on every rank what it had. With live recovery a rank that replaces a lost one gets those of another.
        """
        if self._protected is not None:
            raise BadInput("protect() was called before: name everything in one call")
        self._protected = Protected(things)
        if self._attempt and not (self._live and self._live.is_joining):
            with progress.during(Phase.RESTORING):
                self._restored = restore.restore(self._attempt, self._world, self._protected)
                self._begin()
            if self.rank == 0:
                self._writer = writer_for(self._config, self._attempt, self._world)
                self._writer.prepare(flatten(self._protected.capture()).tensors)  # while the script goes on

    def batches(
        self,
        dataset: MapDataset,
        *,
        global_batch: int,
        num_epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        micro_batches: int = 1,
        num_workers: int = 0,
        collate_fn: Collate = default_collate,
        dataloader_options: Mapping[str, Any] | None = None,
    ) -> Batches:
        """Iterate over the batches that are still to be trained; asking for the next batch is the step boundary.

        A step trains `global_batch` samples, whatever the world size; this rank gets its share of them. `num_epochs` or
        `steps` says how long to train. With `micro_batches` a share comes in that many batches, and gradients are
        all-reduced in the last one. `num_workers` processes load ahead; `dataloader_options` are passed to torch's
        DataLoader, for example {"prefetch_factor": 4}.
        """
        plan = self._planned(dataset, global_batch, num_epochs, steps, seed)
        options = loader_options.checked(num_workers, dataloader_options)
        return Batches(*self._prepare(Shares(dataset, micro_batches, collate_fn), plan, options, by_epoch=False))

    def epochs(
        self,
        dataset: MapDataset,
        *,
        global_batch: int,
        num_epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        micro_batches: int = 1,
        num_workers: int = 0,
        collate_fn: Collate = default_collate,
        dataloader_options: Mapping[str, Any] | None = None,
    ) -> Epochs:
        """Iterate over the epochs that are still to be trained, each an iterable of batches; parameters as in `batches`.

        What the script does after the batches of an epoch is saved with that epoch: the boundary comes when the script
        asks for the next one. A run that resumes in the middle of an epoch iterates over the rest of it.
        """
        plan = self._planned(dataset, global_batch, num_epochs, steps, seed)
        options = loader_options.checked(num_workers, dataloader_options)
        return Epochs(*self._prepare(Shares(dataset, micro_batches, collate_fn), plan, options, by_epoch=True))

    def stop(self) -> None:
        """End the run in order, at the next boundary: its state is saved, and the loop hands out nothing more.

        One rank may call it for all. Called after the batches of an epoch, it ends the run with that epoch.
        """
        if self._stopping is None:
            raise BadInput("stop() came before batches() or epochs(): there is no loop to be ended yet")
        self._stopping.wanted = True

    def _planned(
        self, dataset: MapDataset, global_batch: int, num_epochs: int | None, steps: int | None, seed: int | None
    ) -> SamplePlan:
        return SamplePlan.planned(
            samples=loading.size(dataset),
            batch=global_batch,
            epochs=num_epochs,
            steps=steps,
            seed=self.seed if seed is None else seed,
        )

    def steps(self, steps: int, *, global_batch: int, micro_batches: int = 1) -> Batches:
        """Iterate over `steps` steps whose samples the script draws itself; `batch.data` is the number to draw.

        Draw from torch's, numpy's or Python's generators inside the step that trains the samples. The generators are
        keyed for each step, so after a failure the same world size draws the same samples. The audit counts the
        samples; it cannot check which ones they were.
        """
        samples = Draws(global_batch * LONG)
        return self.batches(
            samples, global_batch=global_batch, steps=steps, micro_batches=micro_batches, collate_fn=len
        )

    def stream(self, loader: Loader, *, steps: int, micro_batches: int = 1) -> Batches:
        """So many steps fed by a loader of this rank's own with `state_dict` and `load_state_dict`, a batch of it each.

        Where the loader is comes back after a failure, on every rank its own, so the number of ranks stays. Give each
        rank its part of the data, and leave the loader out of `protect`. Where it ends it is iterated over anew; if it,
        its sampler or its data set has `set_epoch`, that is called before. `micro_batches` takes that many batches a step.
        All batches count alike, of whatever size. The audit counts them, and cannot say which samples they hold.
        """
        if self._live:
            raise BadInput(
                "run.stream goes with --recovery restart alone: where the loader of a lost rank was, no other rank knows"
            )
        if self._protected and any(thing is loader for thing in self._protected.things.values()):
            raise BadInput("run.stream saves where its loader is, for every rank: leave the loader out of protect()")
        feed, batches = Feed(loader), self.world_size * micro_batches
        feed.go_on(self._restored, self.rank, self.world_size)
        if self.is_main and self.attempt == 1 and feed.caveat:
            logger.warning("%s", feed.caveat)
        counted = Draws(batches * LONG)
        plan = self._planned(counted, batches, None, steps, None)
        return Batches(*self._prepare(Streamed(counted, micro_batches, feed), plan, {"num_workers": 0}, by_epoch=False))

    def log(self, *, loss: float) -> None:
        """Record the loss of the current step in the run's history."""
        self._loss.log(loss)

    def shard(self, dataset: MapDataset) -> DatasetShard:
        """This rank's part of a data set that is evaluated, itself a data set; the parts of all ranks are the whole.

        Parts may differ in size by one: bring results together by `run.sum`, or by `run.mean` with how many each is of.
        """
        return DatasetShard(dataset, self._together.place)

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
        if self.is_main:
            print(*values, sep=sep, end=end, file=file, flush=flush)

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
            ranks.leave()
            if self._attempt and self._attempt.lock:
                self._attempt.lock.release()

    def _while_summing(self) -> None:
        """In every backward, while gradients are summed: what this does costs no time."""
        if self._training:
            self._training.meanwhile()

    def _begin(self) -> None:
        """Where nothing came back, begin with the weights that the run was started with, if it was."""
        if self._config.source and self._restored.step is None and self._protected:
            from holdfast.weights.initial import load_initial_weights  # few runs need it

            weights = load_initial_weights(self._config.source, self._protected, warns=self.rank == 0)
            self._restored = replace(self._restored, weights=weights)

    def _prepare(
        self, shares: Loads, geometry: SamplePlan, options: Mapping[str, Any], *, by_epoch: bool
    ) -> tuple[Course, Turns]:
        """The one loop of the run, over this plan; it is yet to begin."""
        if self._protected is None:
            raise BadInput("batches() came before protect(): first name what is to come back after a failure")
        if self._loop:
            raise BadInput(f"batches() was called before, and a run has one loop, over all its epochs: write {WAY}")
        if loop_checks.in_a_loop() and not self._in_a_loop:
            raise within_a_loop("run.batches(...)")
        preparing = Preparing(
            config=self._config,
            world=self._world,
            attempt=self._attempt,
            record=self._record,
            rehearsal=self._rehearsal,
            live=self._live,
            models=self._models,
            replicas=self._replicas,
            protected=self._protected,
            restored=self._restored,
            writer=self._writer,
            loss=self._loss,
        )
        loop = preparing.loop(shares, geometry, options, by_epoch=by_epoch)
        self._training, self._stopping, turns = loop, loop.stopping, loop.run()
        preparing.end_if_done(geometry, turns)
        self._loop = weakref.ref(turns)  # weak: to leave the loop is to end it
        return Course(shares.dataset, geometry, shares.parts, loop.start, self._in_a_loop), turns
