"""An adapter for Hugging Face's Trainer: call `protect(trainer)` before `trainer.train()`.

    from holdfast.trainers.transformers import protect

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    protect(trainer)
    trainer.train()

The Trainer keeps its loop, but its batches come from the run, so that a resumed run continues with the very next batch.
docs/training.md lists what is restored bit for bit, what is not, and which options are refused.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from holdfast import progress
from holdfast.distributed import ranks
from holdfast.errors import BadInput
from holdfast.train.attach import attach
from holdfast.train.iterators import Batches
from holdfast.train.run import Run
from holdfast.trainers.accelerate_sharding import enable_sharding, is_sharded, unsupported_sharding
from holdfast.trainers.adapter import CollateParts, RankNumbers, RunLoader, check_recovery, unsupported

AnyTrainer = TypeVar("AnyTrainer", bound=Any)

# The fields of a TrainerState that are progress; the rest follows from the script's arguments.
_PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_CLOCKS = ("_runtime", "_per_second")


def protect(trainer: AnyTrainer) -> AnyTrainer:
    """Connect `trainer` to the run that this process belongs to, and return `trainer`. Call this before `trainer.train()`.

    The run then chooses the samples of each step, saves the training state, and restores it after a failure."""
    if not hasattr(trainer, "_init_training_state"):
        raise BadInput("protect() supports the Trainer of transformers 5.22 and later: update the package.")
    for name, reason in _unsupported_options(trainer):
        raise unsupported(name, reason)
    ranks.leave()  # Accelerate has formed a process group; the run forms its own, which detects a lost peer
    run = attach(seed=trainer.args.seed)
    if trainer.args.world_size != run.world_size:
        raise BadInput(
            f"the Trainer is configured for {trainer.args.world_size} of {run.world_size} workers: on CPUs give "
            "TrainingArguments(use_cpu=True)."
        )
    check_recovery(run)
    if is_sharded(trainer):
        enable_sharding(trainer)
    trainer.__dict__.update(_Protection(trainer, run).methods())
    return trainer


def _unsupported_options(trainer: Any) -> Iterator[tuple[str, str]]:
    args = trainer.args
    whole = "every worker must hold the whole model; leave it out"
    if getattr(trainer, "is_deepspeed_enabled", False) or args.deepspeed:
        yield "deepspeed", whole
    yield from unsupported_sharding(trainer)
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "a model that transformers shards while it loads", "give fsdp=True, or leave it out"
    if trainer.is_model_parallel:
        yield "a device_map over several devices", whole
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process", "start a worker for each, with holdfast run --workers"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size", "steps would have another size after a failure; give a batch size that fits"
    if args.train_sampling_strategy != "random":
        yield f"train_sampling_strategy={args.train_sampling_strategy!r}", "the run orders the samples; leave it out"
    if args.accelerator_config.split_batches:
        yield "split_batches", "the run divides a step among the workers; leave it out"
    if args.enable_jit_checkpoint:
        yield "enable_jit_checkpoint", "the run saves when it is asked to stop; leave it out"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        yield f"optim={optimizer!r}", "it steps inside backward, where there is no boundary; choose another"
    if trainer.train_dataset is None:
        yield "train_dataset=None", "give it a dataset with a length and numbered samples"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        yield "a model that was trained before", "call protect() before train(), once"


class _Protection:
    """Replacements for methods of a transformers Trainer, so that the run supplies its batches and saves its state."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer, self._run = trainer, run
        self._run_loader: RunLoader | None = None
        self._prepared: tuple[Any, RunLoader] | None = None
        self._trained = 0  # steps of the first epoch that were trained before this attempt
        self._progress = TransformersProgress(trainer, run)
        self._original: dict[str, Callable[..., Any]] = {}
        if not is_sharded(trainer):
            trainer.accelerator.prepare_model = functools.partial(self._replicate, trainer.accelerator.prepare_model)
        trainer.callback_handler.callbacks.insert(0, _Boundary(self._progress, self._trained_epochs, run))

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements for the Trainer's methods, by name."""
        ours: dict[str, Callable[..., Any]] = {
            "train": self._train,
            "get_train_dataloader": self._loader,
            "get_batch_samples": self._batch_samples,
            "_init_training_state": self._begin,
            "_prepare_for_training": self._prepare,
            "_finalize_training": self._finish,
            "log": self._log,
        }
        self._original = {name: getattr(self._trainer, name) for name in ours}
        return ours

    def _train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **options: Any) -> Any:
        if resume_from_checkpoint or trial is not None:
            name = "resume_from_checkpoint" if resume_from_checkpoint else "a hyperparameter search"
            raise unsupported(name, "the run resumes from its own snapshots, and trains one model")
        if self._prepared:
            raise BadInput("train() was called before: a run trains once, over all its epochs.")
        return self._original["train"](None, None, *args, **options)

    def _loader(self) -> RunLoader:
        trainer = self._trainer
        self._run_loader = RunLoader(
            trainer.train_dataset, self._global_batch, trainer.args.gradient_accumulation_steps
        )
        return self._run_loader

    @property
    def _global_batch(self) -> int:
        args = self._trainer.args
        return int(args.per_device_train_batch_size * self._run.world_size * args.gradient_accumulation_steps)

    def _replicate(self, prepare: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
        """Let Accelerate's `prepare` set up the model without DDP; the run replicates the model instead."""
        if options.pop("evaluation_mode", False):
            return prepare(model, *args, evaluation_mode=True, **options)
        handler = self._trainer.accelerator.ddp_handler
        ready = prepare(model, *args, evaluation_mode=True, **options)
        return self._run.replicate(ready, **(handler.to_kwargs() if handler else {}))

    def _begin(self, max_steps: int, updates: int, epochs: int, _resume: Any, trial: Any) -> tuple[int, int]:
        """Prepare training and restore the saved state. Return the first epoch, and 0, the number of batches to skip."""
        trainer, run_loader = self._trainer, self._run_loader
        assert run_loader is not None
        self._original["_init_training_state"](max_steps, updates, epochs, None, trial)
        self._prepared = self._original["_prepare_for_training"](max_steps, run_loader, None)
        self._run.protect(
            model=trainer.model,
            optimizer=trainer.optimizer.optimizer,
            scheduler=trainer.lr_scheduler,
            **({"scaler": scaler} if (scaler := trainer.accelerator.scaler) is not None else {}),
            trainer=self._progress,
        )
        run_loader.begin(self._batches(run_loader, max_steps), self._progress.ranks.gather)
        if (done := trainer.state.global_step) == max_steps:
            return epochs, 0
        epoch, self._trained = divmod(done, updates)
        return epoch, 0

    def _batches(self, run_loader: RunLoader, max_steps: int) -> Batches:
        trainer = self._trainer
        args = trainer.args
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
        return self._run.batches(
            run_loader.dataset,
            global_batch=self._global_batch,
            steps=max_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            num_workers=args.dataloader_num_workers,
            collate_fn=CollateParts(collate, run_loader.parts),
        )

    def _prepare(self, *_: Any) -> tuple[Any, RunLoader]:
        assert self._prepared is not None
        return self._prepared

    def _batch_samples(self, batches: Iterator[Any], count: int, device: torch.device) -> tuple[list[Any], Any]:
        if self._trained:
            self._trained -= 1
            return [], None
        progress.here.count_post()  # all ranks gather the number of items
        samples: tuple[list[Any], Any] = self._original["get_batch_samples"](batches, count, device)
        return samples

    def _trained_epochs(self) -> float:
        assert self._run_loader is not None
        assert self._run_loader.last is not None
        at = self._run_loader.last
        return at.epoch + (at.cursor + 1) / self._run_loader.steps_per_epoch

    def _finish(self, *args: Any) -> Any:
        assert self._run_loader is not None
        self._run_loader.end(self._run)
        return self._original["_finalize_training"](*args)

    def _log(self, logs: dict[str, float], *args: Any) -> None:
        """Log as the Trainer does, but compute the final speeds only from steps since the last restart."""
        if "train_runtime" in logs and self._progress.begun:
            steps = self._trainer.state.global_step
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] *= (steps - self._progress.begun) / steps
        self._original["log"](logs, *args)


class TransformersProgress:
    """The Trainer's progress as saveable state: its counters, logs, running loss and the state of its callbacks."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer = trainer
        self.ranks = RankNumbers(run.rank, run.world_size, self._sums)
        self._restored: Mapping[str, Any] | None = None
        self.begun = 0  # steps that were trained before the last restart

    def begin(self) -> None:
        """Restore the running loss and operation count (FLOPs) after the Trainer has set them to zero."""
        trainer, state = self._trainer, self._restored
        if state is None:
            return
        loss, flos = self.ranks.own()
        trainer._tr_loss.fill_(float(loss))
        trainer.current_flos = float(flos)
        trainer._total_loss_scalar = state["total_loss"]
        trainer._globalstep_last_logged = state["last_logged"]
        trainer._initial_global_step = trainer._initial_num_input_tokens_seen = 0
        trainer.args.eval_on_start = False  # it ran before the first step, and its result is in the state

    def state_dict(self) -> dict[str, Any]:
        """Return the progress to save in a snapshot, without clock times."""
        trainer = self._trainer
        return {
            **{name: getattr(trainer.state, name) for name in _PROGRESS},
            "log_history": [_without_clocks(logs) for logs in trainer.state.log_history],
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks],
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "ranks": self.ranks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved progress. The running loss and the operation count follow later, when `begin` is called."""
        self._restored = state
        self.ranks.load_state_dict(state["ranks"])
        self.begun = state["global_step"]
        for name in (*_PROGRESS, "log_history"):
            setattr(self._trainer.state, name, state[name])
        for callback, attributes in zip(self._callbacks, state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    @property
    def _callbacks(self) -> list[Any]:
        return [
            callback for callback in self._trainer.callback_handler.callbacks if isinstance(callback, ExportableState)
        ]

    def _sums(self) -> torch.Tensor:
        loss: torch.Tensor = self._trainer._tr_loss
        return torch.stack([loss.double(), loss.new_tensor(self._trainer.current_flos, dtype=torch.float64)])


class _Boundary(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """The first callback of the Trainer: it restores the running loss, corrects the epoch and records losses."""

    def __init__(self, progress: TransformersProgress, trained_epochs: Callable[[], float], run: Run) -> None:
        self._progress, self._trained_epochs, self._run = progress, trained_epochs, run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore the running loss, which the Trainer has just set to zero."""
        self._progress.begin()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Set `state.epoch` from the run, because the Trainer counts only the batches since the last restart."""
        state.epoch = self._trained_epochs()

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Record the logged loss in the run's history."""
        if logs and "loss" in logs:
            self._run.log(loss=logs["loss"])


def _without_clocks(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if not name.endswith(_CLOCKS)}
