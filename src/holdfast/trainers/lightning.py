"""An adapter for Lightning's Trainer: call `protect(trainer)` before `trainer.fit(...)`.

    from holdfast.trainers.lightning import protect

    trainer = L.Trainer(max_epochs=3, strategy="ddp", devices=2, accelerator="cpu")
    protect(trainer)
    trainer.fit(module, loader)

The Trainer keeps its loops, but its batches come from the run, so that a resumed run continues with the very next
batch. docs/training.md lists what is restored bit for bit, what is not, and which options are refused.
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
from holdfast.trainers.adapter import CollateParts, RankNumbers, RunLoader, check_recovery, unsupported
from holdfast.trainers.metrics import RunningSums
from holdfast.trainers.model_parallel import is_model_parallel, is_tensor_parallel

AnyTrainer = TypeVar("AnyTrainer", bound=Any)


def protect(trainer: AnyTrainer) -> AnyTrainer:
    """Connect `trainer` to the run that this process belongs to, and return `trainer`. Call this before `trainer.fit(...)`.

    The run then chooses the samples of each step, saves the training state, and restores it after a failure."""
    for name, reason in _unsupported_options(trainer):
        raise unsupported(name, reason)
    seed = os.environ.get("PL_GLOBAL_SEED")
    run = attach(seed=int(seed or 0))
    if trainer.world_size != run.world_size:
        raise BadInput(
            f"the Trainer is configured for {trainer.world_size} workers, and {run.world_size} were started: give "
            "Trainer(strategy='ddp', devices=...) the number of workers on this machine (holdfast run --workers)."
        )
    check_recovery(run)
    _Protection(trainer, run, None if seed is None else int(seed)).install()
    return trainer


def _unsupported_options(trainer: Any) -> Iterator[tuple[str, str]]:
    strategy = type(trainer.strategy).__name__
    if strategy not in ("DDPStrategy", "SingleDeviceStrategy") and not is_model_parallel(trainer.strategy):
        yield strategy, "its state cannot be saved; choose 'ddp', or ModelParallelStrategy for a sharded model"
    if is_tensor_parallel(trainer.strategy):
        yield "tensor parallelism", "workers train different samples; give ModelParallelStrategy tensor_parallel_size=1"
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


def _unsupported_features(module: Any, root: str) -> Iterator[tuple[str, str]]:
    if not module.automatic_optimization:
        yield "automatic_optimization=False", "a step must be one boundary; leave it to the Trainer"
    fetcher = import_module(f"{root}.utilities.signature_utils")
    if fetcher.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield "dataloader_iter in training_step", "a step must be one boundary; take the batch"
    overridden = import_module(f"{root}.utilities.model_helpers").is_overridden
    if overridden("on_save_checkpoint", module):
        yield "on_save_checkpoint of a module", "what it adds would not be restored; keep it in buffers"


class _Protection:
    """Replacements for methods of a Lightning Trainer, so that the run supplies its batches and saves its state."""

    def __init__(self, trainer: Any, run: Run, seed: int | None) -> None:
        self._trainer, self._run, self._seed = trainer, run, seed
        self._root = type(trainer.fit_loop).__module__.partition(".loops")[0]
        self._run_loader: RunLoader | None = None
        self._progress: LightningProgress | None = None

    def install(self) -> None:
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
            raise unsupported("ckpt_path", "the run resumes from its own snapshots")
        if self._run_loader:
            raise BadInput("fit() was called before: a run trains once, over all its epochs.")
        return fit(*args, **options)

    def _begin(self, restore: Callable[[], None]) -> None:
        """Call Lightning's own `restore`; in `fit`, also restore this run's state and replace the training loader."""
        restore()
        trainer = self._trainer
        if trainer.state.fn != "fit":
            return
        for name, reason in _unsupported_features(trainer.lightning_module, self._root):
            raise unsupported(name, reason)
        if is_model_parallel(trainer.strategy) and self._run.world_size > 1:
            from holdfast.train.sharded import check_all_sharded  # a slow import

            check_all_sharded(trainer.lightning_module)
        loader, run_loader = self._loader()
        self._run_loader = run_loader
        self._progress = progress = LightningProgress(trainer, self._run, import_module(f"{self._root}.trainer.call"))
        trainer.fit_loop.epoch_loop._results = progress.sums.results(trainer.fit_loop.epoch_loop._results)
        self._run.protect(
            model=trainer.lightning_module,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
            trainer=progress,
        )
        run_loader.begin(self._batches(loader, run_loader), progress.ranks.gather)
        sources = import_module(f"{self._root}.trainer.connectors.data_connector")
        trainer.fit_loop._data_source = sources._DataLoaderSource(run_loader, "train_dataloader")

    def _loader(self) -> tuple[DataLoader[Any], RunLoader]:
        trainer = self._trainer
        loader = trainer.fit_loop._data_source.dataloader()
        if not isinstance(loader, DataLoader):
            raise unsupported(f"a {type(loader).__name__} to train from", "give one DataLoader of torch")
        plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) is RandomSampler
        if not plain or loader.batch_size is None:
            raise unsupported(
                f"a loader with a {type(loader.sampler).__name__}",
                "the run orders the samples; give DataLoader(..., shuffle=True) without a sampler",
            )
        parts = trainer.accumulate_grad_batches
        dataset: Any = loader.dataset
        return loader, _StatefulRunLoader(dataset, loader.batch_size * self._run.world_size * parts, parts)

    def _batches(self, loader: DataLoader[Any], run_loader: RunLoader) -> Batches:
        trainer = self._trainer
        ends = (trainer.max_steps, trainer.fit_loop.max_epochs * run_loader.steps_per_epoch)
        return self._run.batches(
            run_loader.dataset,
            global_batch=run_loader.global_batch,
            steps=min(end for end in ends if end >= 0),
            seed=self._seed,
            num_workers=loader.num_workers,
            collate_fn=CollateParts(loader.collate_fn, run_loader.parts),
        )

    def _epoch_begins(self, begin: Callable[[Any], None], fetcher: Any) -> None:
        """Restore the loop counters if the run resumes in the middle of an epoch, and call Lightning's own `begin`."""
        assert self._progress is not None
        self._progress.restore_loops()
        begin(fetcher)
        _clear_restarting(self._trainer.fit_loop)

    def _run_all(self, run: Callable[[], None]) -> None:
        run()
        assert self._run_loader is not None
        self._run_loader.end(self._run)


class _StatefulRunLoader(RunLoader):
    """A run loader with an empty state dict, so that Lightning accepts it as resumable; the run saves the position."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class LightningProgress:
    """The Trainer's progress as saveable state: its loops, callbacks, data module and sums of logged values."""

    def __init__(self, trainer: Any, run: Run, call: Any) -> None:
        self._trainer, self._call = trainer, call
        self.sums = RunningSums(trainer.lightning_module)
        self.ranks = RankNumbers(run.rank, run.world_size, self.sums.take)
        self._loops: Mapping[str, Any] | None = None  # the restored loops, in the middle of an epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the progress to save in a snapshot."""
        trainer = self._trainer
        module = trainer.datamodule
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": self._call._call_callbacks_state_dict(trainer),
            "datamodule": module.state_dict() if module is not None else {},
            "precision": trainer.precision_plugin.state_dict(),
            "monitored": dict(trainer._logger_connector._callback_metrics),
            "figures": self.sums.names(),
            "ranks": self.ranks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved progress. The sum of a logged value is restored when the value is logged next."""
        trainer = self._trainer
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        if loop.epoch_progress.current.processed < loop.epoch_progress.current.ready:
            self._loops = state["loops"]
        else:
            _clear_restarting(loop)  # the epoch is complete, so the next one starts
        self._call._call_callbacks_load_state_dict(trainer, state)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        trainer.precision_plugin.load_state_dict(state["precision"])
        trainer._logger_connector._callback_metrics.update(state["monitored"])
        self.ranks.load_state_dict(state["ranks"])
        self.sums.restore(state["figures"], self.ranks.own())

    def restore_loops(self) -> None:
        """Set the loop counters to their restored values, at the first call only."""
        if self._loops is not None:
            self._trainer.fit_loop.load_state_dict(self._loops)
        self._loops = None


def _clear_restarting(loop: Any) -> None:
    loop._restarting = False  # with `max_steps` the outer loop has no public way to do this
    loop.epoch_loop.restarting = False


def _numbered(name: str, things: list[Any]) -> dict[str, Any]:
    return {name if not number else f"{name}_{number}": thing for number, thing in enumerate(things)}
