"""The run that a training script belongs to: the object that `holdfast.attach()` returns."""

import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import default_collate

from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import SamplePlan
from holdfast.train.data import dataset as datasets
from holdfast.train.data.dataset import MapDataset
from holdfast.train.data.loader import Collate, ShareDataset, checked_options
from holdfast.train.data.phases import TrainingPhase
from holdfast.train.data.samplers import DrawnOrders, Sampler
from holdfast.train.data.stream import LONG, Loader, LoaderBatches, OwnSamples, Streamed
from holdfast.train.evaluation import DatasetShard, RankReducer
from holdfast.train.iterators import Batches, Epochs
from holdfast.train.session import Session
from holdfast.train.state.object_state import Protectable
from holdfast.train.state.plain_values import PlainValue
from holdfast.train.state.unwrapped_models import unwrapped

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # a slow import that few scripts need

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


class Run:
    """The object with which a training script takes part in a run. `holdfast.attach()` returns it."""

    def __init__(self, config: RunConfig, ranks: Ranks, out: str | os.PathLike[str] | None) -> None:
        self._session = Session(config, ranks, out)

    @functools.cached_property
    def _reducer(self) -> RankReducer:
        return RankReducer(self._session.ranks, self._session.live)

    @property
    def rank(self) -> int:
        """The rank of this process, from 0. It stays the same as long as the process lives.

        A worker that replaces a lost worker has the rank of the lost worker. A spare worker (`--spares`) has no rank: in
        such a process, this property waits until the worker replaces a lost worker."""
        return self._session.rank

    @property
    def is_main(self) -> bool:
        """True on rank 0, where the script should print, log and upload. The value never changes in a process."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """The number of worker processes that train together."""
        return self._session.ranks.size

    @property
    def device(self) -> torch.device:
        """The device for this rank's model and batches."""
        return self._session.ranks.device

    @property
    def seed(self) -> int:
        """The seed of the sample order and of all random generators."""
        return self._session.config.seed or 0

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Each start of all workers begins an attempt."""
        return self._session.number

    @property
    def is_live(self) -> bool:
        """True if the other workers continue when a worker is lost; False if all workers are then restarted."""
        return self._session.live is not None

    @functools.cached_property
    def mesh(self) -> "DeviceMesh":
        """The device mesh of all ranks, for models sharded with FSDP2: `fully_shard(block, mesh=run.mesh)`."""
        return self.device_mesh()

    def device_mesh(self, *, replicas: int = 1, tensor_parallel: int = 1) -> "DeviceMesh":
        """Return a device mesh of all ranks, for models sharded with FSDP2.

        The mesh has the dimension `shard`. Shard a model over it with `fully_shard(block, mesh=mesh["shard"])`.

        If `replicas` is more than 1, the mesh also has the dimension `replicate`, for hybrid sharding (HSDP). The ranks
        then form `replicas` groups. Each group holds the whole model, sharded over the ranks of the group. Shard the
        model with `mesh["replicate", "shard"]`.

        If `tensor_parallel` is more than 1, the mesh has the additional last dimension `tensor`, of this size. Ranks
        that differ only in this dimension get the same samples and the same random numbers in every step. With
        `tensor_parallel`, call this method before `protect`."""
        return self._session.make_mesh(replicas, tensor_parallel)

    def replicate(self, model: Model, **options: object) -> Model:
        """Return the model with rank 0's weights, wrapped so that every backward averages gradients over all ranks.

        The wrapper is torch's DistributedDataParallel, which gets the `options`. The loss must be a mean over the batch,
        as PyTorch's losses are by default. The averaged gradient is then the mean over all samples of the step. If the
        run has a single rank, the method returns the model itself."""
        return cast(Model, self._session.replicate(model, options))

    def protect(self, **things: Protectable | PlainValue) -> None:
        """Name the objects that every snapshot contains. If the run resumes from a snapshot, this call restores them.

        Each object must have `state_dict` and `load_state_dict`, or be a dict or list of plain values, tensors and
        arrays. The run always restores the random generators and the position in the data, so do not pass them.

        Dicts and lists are restored in place, and each rank gets its own dicts and lists back. But under `holdfast run
        --recovery forward` or `skip`, a worker that replaces a lost worker gets the dicts and lists of another rank.

        A snapshot contains rank 0's values only of modules' buffers and of objects of your own classes, and all ranks get
        these values. So values that differ between ranks must be in a dict or list."""
        self._session.protect(things)

    def batches(
        self,
        dataset: MapDataset,
        *,
        global_batch: int,
        num_epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        sampler: Sampler | None = None,
        micro_batches: int = 1,
        num_workers: int = 0,
        collate_fn: Collate = default_collate,
        dataloader_options: Mapping[str, Any] | None = None,
    ) -> Batches:
        """Return an iterator over this rank's batches that are not trained yet.

        Train each batch before you ask for the next batch: this request ends the step, and the run may then save the
        state.

        - `global_batch`: the number of samples that all ranks together train in a step, over all micro-batches. Give a
          number that does not depend on `run.world_size`: a run that continues with another global batch is refused.
        - `num_epochs` or `steps`: how long to train. Give one of them.
        - `seed`: the seed of the order of the samples. The default is the seed of the run.
        - `sampler`: the order of the samples. It is a torch sampler such as WeightedRandomSampler, or a function of the
          epoch and the seed that returns the indices of an epoch. The default shuffles all samples in every epoch.
        - `micro_batches`: the number of batches into which this rank's samples of a step are divided, to accumulate
          gradients. The gradients of a model of `run.replicate` are all-reduced in the last of these batches.
        - `num_workers`: the number of processes that load samples ahead of time.
        - `collate_fn`: the function that makes a batch from a list of samples, as in torch's DataLoader.
        - `dataloader_options`: further parameters of torch's DataLoader, for example `{"prefetch_factor": 4}`.

        If a script has several training loops, such as pretraining and finetuning, call this method for all loops
        before you iterate over the first one. Each loop is a phase of the run, and counts its steps and epochs from 0.
        """
        plan = self._plan(dataset, global_batch, num_epochs, steps, seed, sampler)
        options = checked_options(num_workers, dataloader_options)
        shares = ShareDataset(dataset, micro_batches, collate_fn)
        phase = TrainingPhase(plan=plan, loads=shares, options=options, by_epoch=False)
        return Batches(self._session.add_phase(phase), dataset, micro_batches)

    def epochs(
        self,
        dataset: MapDataset,
        *,
        global_batch: int,
        num_epochs: int | None = None,
        steps: int | None = None,
        seed: int | None = None,
        sampler: Sampler | None = None,
        micro_batches: int = 1,
        num_workers: int = 0,
        collate_fn: Collate = default_collate,
        dataloader_options: Mapping[str, Any] | None = None,
    ) -> Epochs:
        """Return an iterable over the epochs that are not completely trained yet. Each epoch is an iterable of batches.

        The parameters are those of `batches`. The last step of an epoch ends only when the script asks for the next
        epoch. So the code after the inner loop, such as `scheduler.step()`, runs before the snapshot at the end of the
        epoch. If a run resumes in the middle of an epoch, the first epoch has the remaining batches only."""
        plan = self._plan(dataset, global_batch, num_epochs, steps, seed, sampler)
        options = checked_options(num_workers, dataloader_options)
        shares = ShareDataset(dataset, micro_batches, collate_fn)
        phase = TrainingPhase(plan=plan, loads=shares, options=options, by_epoch=True)
        return Epochs(self._session.add_phase(phase), dataset, micro_batches)

    def stop(self) -> None:
        """End the run before the next step: all ranks save the state, and their training loops end.

        It is enough that one rank calls this method. If it is called after the last batch of an epoch, the run ends
        with this epoch."""
        if self._session.stopping is None:
            raise BadInput("stop() ends the loop of this run, and it has not begun: call it inside the loop.")
        self._session.stopping.request()

    def steps(self, steps: int, *, global_batch: int, micro_batches: int = 1) -> Batches:
        """Return an iterator over `steps` steps in which the script itself draws the samples.

        `batch.data` is the number of samples that this rank draws in the step, or in one of its `micro_batches`. If the
        script divides a step into micro-batches itself, it draws `batch.data` samples in all of them together.

        Draw the samples inside this step, with the global generators of torch, numpy or Python: leave out `generator=`.
        The run seeds these generators for each step, and does not restore others. So if a step is repeated after a
        failure, the script draws the same samples, unless the world size has changed. `holdfast audit` counts the
        samples, but cannot check which samples they were."""
        samples = OwnSamples(global_batch * LONG)
        return self.batches(
            samples, global_batch=global_batch, steps=steps, micro_batches=micro_batches, collate_fn=len
        )

    def stream(self, loader: Loader, *, steps: int, micro_batches: int = 1) -> Batches:
        """Return an iterator over `steps` steps of batches from a loader with `state_dict` and `load_state_dict`.

        Give each rank a loader of its own part of the data. Do not pass the loader to `protect`: each snapshot contains
        the position of every rank's loader. So the world size must stay the same after a restart. With tensor
        parallelism, ranks that differ only in the mesh dimension `tensor` need loaders of the same part. So divide the data
        into `run.world_size // tensor_parallel` parts, and give each rank part `run.rank // tensor_parallel`.

        When a loader ends, the run iterates over it again. Before this, it calls `set_epoch` with the number of the new
        pass (the first pass is 0), on the loader, its sampler and its dataset, if they have this method.

        Each rank takes `micro_batches` batches in a step. All batches count equally in the averaged gradient, even if
        their sizes differ. `holdfast audit` counts the batches, but cannot check which samples they contain."""
        session = self._session
        if session.live:
            raise BadInput(
                "run.stream needs --recovery restart: no other rank knows the position of a lost rank's loader."
            )
        if session.protected and any(thing is loader for thing in session.protected.things.values()):
            raise BadInput(
                "run.stream saves the position of its loader on every rank: leave the loader out of protect()."
            )
        feed, batches = LoaderBatches(loader), session.ranks.shares * micro_batches
        feed.resume(session.restored, self.rank, self.world_size)
        if session.restored.step is not None and not session.restored.has_shares_of(session.ranks):
            raise BadInput(
                f"this run was saved with another tensor_parallel than {session.ranks.tensor_parallel}, so the saved positions "
                "are those of loaders over other parts of the data: resume with the same, or name another folder."
            )
        if self.is_main and self.attempt == 1 and feed.caveat:
            logger.warning("%s", feed.caveat)
        counted = OwnSamples(batches * LONG)
        plan = self._plan(counted, batches, None, steps, None)
        loads = Streamed(counted, micro_batches, feed)
        phase = TrainingPhase(plan=plan, loads=loads, options={"num_workers": 0}, by_epoch=False)
        return Batches(session.add_phase(phase), counted, micro_batches)

    def log(self, *, loss: float) -> None:
        """Record the loss of the current step in the history of the run, which `holdfast report` and `watch` show."""
        self._session.loss.log(loss)

    def shard(self, dataset: MapDataset) -> DatasetShard:
        """Return this rank's part of a dataset for an evaluation. Each sample is in exactly one part.

        The sizes of two parts may differ by one. So combine the results of the ranks with `run.sum`, or with `run.mean`
        and the sizes as weights.

        With a sharded model, all ranks must evaluate the same number of batches, because the forward pass communicates.
        So for a sharded model, holdfast raises an error if the DataLoaders of the ranks would yield different numbers
        of batches. It cannot detect different numbers with `drop_last=True`, or in a loop without a DataLoader: the
        ranks with more batches then wait for the others, until the run counts as hanging."""
        return DatasetShard(dataset, self._reducer.place, lambda: self._session.has_shards)

    def sum(self, value: Any) -> Any:
        """Return the sum of `value` over all ranks: a number, a tensor, or a nested structure of these.

        All ranks must call this method."""
        return self._reducer.sum(value)

    def mean(self, value: Any, weight: float = 1.0) -> Any:
        """Return the mean of `value` over all ranks, weighted by `weight`, such as this rank's number of samples.

        All ranks must call this method. If a rank has no samples, it passes the weight 0, and its value is ignored, also
        if it is NaN."""
        return self._reducer.mean(value, weight)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: Any = None,
        flush: bool = True,
    ) -> None:
        """Print the values on rank 0 only. The parameters are those of Python's `print`, but `flush` is True by default."""
        if self._session.known_rank == 0:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module inside `model`, without the wrappers that `run.replicate` and `torch.compile` added."""
        return unwrapped(model)

    def close(self) -> None:
        """End the training loop if it has not ended, close the history, and leave the process group.

        The process also does this when it exits, so a script does not have to call this method."""
        self._session.close()

    def _plan(
        self,
        dataset: MapDataset,
        global_batch: int,
        num_epochs: int | None,
        steps: int | None,
        seed: int | None,
        sampler: Sampler | None = None,
    ) -> SamplePlan:
        samples, seed = datasets.size(dataset), self._session.seed_of_next_phase if seed is None else seed
        orders = None if sampler is None else DrawnOrders(sampler, samples, seed)
        return SamplePlan.planned(
            samples=orders.samples if orders else samples,
            batch=global_batch,
            epochs=num_epochs,
            steps=steps,
            seed=seed,
            orders=orders,
        )
