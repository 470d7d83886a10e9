"""Lightning's Trainer under a run: `protect(trainer)` before `trainer.fit(...)`, and nothing else.

    from holdfast.trainers.lightning import protect

    trainer = L.Trainer(max_epochs=3, strategy="ddp", devices=2, accelerator="cpu")
    protect(trainer)
    trainer.fit(module, loader)

The Trainer keeps its loops. Of the loader for training only the dataset, batch size, `collate_fn` and `num_workers` are
used: its batches are the windows of the run, so that a resume goes on with the very next batch. Module, optimizers,
schedulers, precision, the loops' progress, the state of callbacks and of a data module, and the sums behind
`self.log(..., on_epoch=True)` and behind metrics of torchmetrics are saved through the run's store, and come back bit by
bit. A window is the loader's batch size times the number of workers times `accumulate_grad_batches`; samples that do not
fill one wait for the next shuffle. The order of the samples and all random draws follow the seed of `seed_everything`,
or else that of the run.

What breaks this is refused, each with the reason:

- strategies other than DDP and a single device: a rank must hold the whole state;
- `ckpt_path` given to `fit`: the run goes on from its own snapshots;
- several loaders, samplers of one's own, loaders that do not shuffle, datasets without a length and numbered samples: the
  order of the samples is the run's;
- `limit_train_batches`, `overfit_batches`, `reload_dataloaders_every_n_epochs`: an epoch is the whole dataset, every time;
- `max_time` and a `val_check_interval` of clock time: another attempt would stop or validate elsewhere;
- `automatic_optimization=False` and a `training_step` that takes `dataloader_iter`: a step must be one boundary;
- a module that overrides `on_save_checkpoint`: keep what it adds in buffers instead, which come back;
- `--recovery` other than `restart`, because survivors of a lost worker cannot mend the collectives of the Trainer.

Not exact, by their nature: times, what loggers write (each attempt its own version), the files of `ModelCheckpoint`
and their names (some may be of steps that are then trained again), callbacks that keep a state without `state_dict`,
and metrics that keep lists. `on_train_start` is called in every attempt. Lightning's own handler of SIGTERM is left
out: the run saves and stops in order.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from holdfast.errors import BadInput
from holdfast.train.attach import attach
from holdfast.train.iterators import Batches
from holdfast.train.run import Run
from holdfast.trainers.metrics import Figures
from holdfast.trainers.per_rank import EachRank
from holdfast.trainers.windows import Windows

AnyTrainer = TypeVar("AnyTrainer", bound=Any)


def protect(trainer: AnyTrainer) -> AnyTrainer:
    """Have this Trainer train as a part of the run this process belongs to; the same Trainer comes back."""
    for name, why in _refused(trainer):
        raise _cannot(name, why)
    seed = os.environ.get("PL_GLOBAL_SEED")
    run = attach(seed=int(seed or 0))
    if trainer.world_size != run.world_size:
        raise BadInput(
            f"the Trainer counts {trainer.world_size} workers, and {run.world_size} were started: give "
            f"Trainer(strategy='ddp', devices=...) the number of holdfast run --workers on this machine"
        )
    if run.is_live:
        raise _cannot("live recovery", "survivors cannot mend its own collectives; choose --recovery restart")
    _Protection(trainer, run, None if seed is None else int(seed)).take_over()
    return trainer


def _cannot(name: str, why: str) -> BadInput:
    return BadInput(f"a protected Trainer does not go with {name}: {why}")


def _refused(trainer: Any) -> Iterator[tuple[str, str]]:
    """The Trainer's options that cannot be exact, and why."""
    strategy = type(trainer.strategy).__name__
    if strategy not in ("DDPStrategy", "SingleDeviceStrategy"):
        yield strategy, "every worker must hold the whole model; choose strategy='ddp'"
    if getattr(trainer.strategy, "_start_method", "popen") != "popen":
        yield "strategies that start processes themselves", "holdfast run starts the workers; choose strategy='ddp'"
    if trainer.limit_train_batches != 1.0 or trainer.overfit_batches:
        yield "limit_train_batches and overfit_batches", "an epoch is the whole dataset; give a smaller dataset"
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs", "all epochs are of one dataset; leave it out"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "a val_check_interval of clock time", "another attempt would validate elsewhere; give steps or a fraction"
    if any(type(callback).__name__ == "Timer" for callback in trainer.callbacks):
        yield "max_time", "another attempt would stop elsewhere; give max_epochs or max_steps"
    if trainer.fit_loop.max_epochs == -1 and trainer.max_steps == -1:
        yield "max_epochs=-1", "a run has an end; give it a number"


def _refused_of(module: Any, trainer: Any, root: str) -> Iterator[tuple[str, str]]:
    """Yield the features of the module that prevent exact recovery, each with the reason."""
    if not module.automatic_optimization:
        yield "automatic_optimization=False", "a step must be one boundary; leave it to the Trainer"
    fetcher = import_module(f"{root}.utilities.signature_utils")
    if fetcher.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield "dataloader_iter in training_step", "a step must be one boundary; take the batch"
    overridden = import_module(f"{root}.utilities.model_helpers").is_overridden
    if overridden("on_save_checkpoint", module):
        yield "on_save_checkpoint of a module", "what it adds would not come back; keep it in buffers"


class _Protection:
    """The methods of a protected Trainer that are replaced: its source of batches and its step boundaries."""

    def __init__(self, trainer: Any, run: Run, seed: int | None) -> None:
        self._trainer, self._run, self._seed = trainer, run, seed
        self._root = type(trainer.fit_loop).__module__.partition(".loops")[0]
        self._windows: Windows | None = None
        self._progress: LightningProgress | None = None

    def take_over(self) -> None:
        """Replace those parts of the Trainer that are ours to do."""
        trainer = self._trainer
        strategy, loop = trainer.strategy, trainer.fit_loop
        if hasattr(strategy, "_ddp_kwargs"):
            strategy._setup_model = lambda model: self._run.replicate(model, **strategy._ddp_kwargs)
        connector = trainer._checkpoint_connector
        connector.restore_training_state = functools.partial(self._begin, connector.restore_training_state)
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit = functools.partial(self._fit, trainer.fit)
        loop.run = functools.partial(self._run_all, loop.run)
        epoch = loop.epoch_loop
        epoch.on_run_start = functools.partial(self._epoch_begins, epoch.on_run_start)

    def _fit(self, fit: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if len(args) > 4 or options.get("ckpt_path") is not None:
            raise _cannot("ckpt_path", "the run goes on from its own snapshots")
        if self._windows:
            raise BadInput("fit() was called before: a run trains once, over all its epochs")
        return fit(*args, **options)

    def _begin(self, restore: Callable[[], None]) -> None:
        """Everything is set up, and nothing is trained yet: have the state back, and feed the windows of the run."""
        restore()
        trainer = self._trainer
        if trainer.state.fn != "fit":
            return
        for name, why in _refused_of(trainer.lightning_module, trainer, self._root):
            raise _cannot(name, why)
        loader, windows = self._loader()
        self._windows = windows
        self._progress = progress = LightningProgress(trainer, self._run, import_module(f"{self._root}.trainer.call"))
        trainer.fit_loop.epoch_loop._results = progress.figures.results(trainer.fit_loop.epoch_loop._results)
        self._run.protect(
            model=trainer.lightning_module,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
            trainer=progress,
        )
        windows.begin(self._batches(loader, windows), progress.gather)
        sources = import_module(f"{self._root}.trainer.connectors.data_connector")
        trainer.fit_loop._data_source = sources._DataLoaderSource(windows, "train_dataloader")

    def _loader(self) -> tuple[DataLoader[Any], Windows]:
        """The user's loader, and the windows in its place."""
        trainer = self._trainer
        loader = trainer.fit_loop._data_source.dataloader()
        if not isinstance(loader, DataLoader):
            raise _cannot(f"a {type(loader).__name__} to train from", "give one DataLoader of torch")
        plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) is RandomSampler
        if not plain or loader.batch_size is None:
            raise _cannot(
                f"a loader with a {type(loader.sampler).__name__}",
                "the run orders the samples; give DataLoader(..., shuffle=True) and no sampler",
            )
        parts = trainer.accumulate_grad_batches
        dataset: Any = loader.dataset
        return loader, _Stateful(dataset, loader.batch_size * self._run.world_size * parts, parts)

    def _batches(self, loader: DataLoader[Any], windows: Windows) -> Batches:
        trainer = self._trainer
        ends = (trainer.max_steps, trainer.fit_loop.max_epochs * windows.steps_per_epoch)
        return self._run.batches(
            windows.dataset,
            global_batch=windows.global_batch,
            steps=min(end for end in ends if end >= 0),
            seed=self._seed,
            num_workers=loader.num_workers,
            collate_fn=windows.collate(loader.collate_fn),
        )

    def _epoch_begins(self, begin: Callable[[Any], None], fetcher: Any) -> None:
        """An epoch begins, or goes on: then its counters are as they were saved, and this is no restart.

        In a restart Lightning counts again, leaves out or does twice what it may have done before a checkpoint of its
        own: steps, schedules and validations. A snapshot of ours is of a boundary, where all of it is done.
        """
        assert self._progress is not None
        self._progress.put_back_loops()
        begin(fetcher)
        _go_on(self._trainer.fit_loop)

    def _run_all(self, run: Callable[[], None]) -> None:
        run()
        assert self._windows is not None
        self._windows.end(self._run)


class _Stateful(Windows):
    """Has a state, so that Lightning knows that it goes on where it was; the run knows where that is."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


class LightningProgress:
    """The progress of the Trainer as state: its loops, their running sums, its callbacks and its data module."""

    def __init__(self, trainer: Any, run: Run, call: Any) -> None:
        self._trainer, self._call = trainer, call
        self.figures = Figures(trainer.lightning_module)
        self._ranks = EachRank(run.rank, run.world_size, self.figures.take)
        self._loops: Mapping[str, Any] | None = None  # the restored loops, in the middle of an epoch

    def gather(self) -> None:
        """Gather the running sums of all ranks; called before a boundary."""
        self._ranks.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        trainer = self._trainer
        module = trainer.datamodule
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": self._call._call_callbacks_state_dict(trainer),
            "datamodule": module.state_dict() if module is not None else {},
            "precision": trainer.precision_plugin.state_dict(),
            "monitored": dict(trainer._logger_connector._callback_metrics),
            "figures": self.figures.names(),
            "ranks": self._ranks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; running sums are restored when something is added to them."""
        trainer = self._trainer
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        if loop.epoch_progress.current.processed < loop.epoch_progress.current.ready:
            self._loops = state["loops"]
        else:
            _go_on(loop)  # the epoch is complete, so the next one starts
        self._call._call_callbacks_load_state_dict(trainer, state)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        trainer.precision_plugin.load_state_dict(state["precision"])
        trainer._logger_connector._callback_metrics.update(state["monitored"])
        self.figures.put_back(state["figures"], self._ranks.mine(state["ranks"]))

    def put_back_loops(self) -> None:
        """Have the counters of the loops as they came back, once."""
        if self._loops is not None:
            self._trainer.fit_loop.load_state_dict(self._loops)
        self._loops = None


def _go_on(loop: Any) -> None:
    """Have the loops go on as if they had never ended. With `max_steps` the outer one refuses to be told in public."""
    loop._restarting = False
    loop.epoch_loop.restarting = False


def _numbered(name: str, things: list[Any]) -> dict[str, Any]:
    """Things by name: the first by its plain name, others with a number."""
    return {name if not number else f"{name}_{number}": thing for number, thing in enumerate(things)}
