"""Hugging Face's Trainer under a run: `protect(trainer)` before `trainer.train()`, and nothing else.

    from holdfast.trainers.transformers import protect

    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    protect(trainer)
    trainer.train()

The Trainer keeps its loop. Its batches are the windows of the run, so that a resume goes on with the very next batch;
model, optimizer, scheduler, gradient scaler, the Trainer's state and running loss, and the state of callbacks that are
`ExportableState` are saved through the run's store and come back bit by bit. A window is `per_device_train_batch_size`
times the number of workers times `gradient_accumulation_steps`; samples that do not fill one wait for the next shuffle,
as with `dataloader_drop_last`. The order of the samples and all random draws follow `data_seed`, or else `seed`.

What breaks this is refused, each with the reason:

- `resume_from_checkpoint` and hyperparameter search: the run goes on from its own snapshots, and trains one model;
- `deepspeed`, `fsdp`, tensor, context and sequence parallelism, `device_map` over several devices, and several GPUs in
  one process: a rank must hold the whole state, and train one part of a window;
- `auto_find_batch_size`: windows would be of another size after a failure;
- `train_sampling_strategy` other than `random`, and `split_batches`: the order and the sizes of batches are the run's;
- optimizers that step inside backward (LOMO, the layerwise ones): a step must be one boundary;
- `enable_jit_checkpoint`: the run itself saves and stops when it is asked to;
- datasets without a length and numbered samples; `--recovery` other than `restart`, because survivors of a lost worker
  cannot mend the collectives of the Trainer.

Not exact, by their nature: times and speeds (`train_runtime` is that of the last attempt; past ones are left out of the
`log_history` that comes back), callbacks that keep a state of their own and are no `ExportableState`, and files that
the Trainer writes itself (`save_strategy`), which may be of steps that are then trained again. A callback's
`on_train_begin` is called in every attempt, and `on_epoch_begin` in the middle of an epoch. Another number of workers
may go on if the batch size is changed so that a window stays what it was.
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
from holdfast.trainers.per_rank import EachRank
from holdfast.trainers.windows import Windows

AnyTrainer = TypeVar("AnyTrainer", bound=Any)

# What of a TrainerState is progress; the rest is said by the script's arguments.
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
    """Have this Trainer train as a part of the run this process belongs to; the same Trainer comes back."""
    _check(trainer)
    ranks.leave()  # Accelerate has formed a group: the run forms its own, which finds a lost peer
    run = attach(seed=trainer.args.seed)
    _check_world(trainer, run)
    trainer.__dict__.update(_Protection(trainer, run).methods())
    return trainer


def _check(trainer: Any) -> None:
    """Refuse what cannot be exact, in one line."""
    if not hasattr(trainer, "_init_training_state"):
        raise BadInput("protect() knows the Trainer of transformers 5.22 and later: update the package")
    for name, why in _refused(trainer):
        raise BadInput(f"a protected Trainer does not go with {name}: {why}")


def _refused(trainer: Any) -> Iterator[tuple[str, str]]:
    args = trainer.args
    whole = "every worker must hold the whole model: leave it out"
    if getattr(trainer, "is_deepspeed_enabled", False) or args.deepspeed:
        yield "deepspeed", whole
    if getattr(trainer, "is_fsdp_enabled", False) or args.fsdp:
        yield "fsdp", whole
    if args.parallelism_config is not None or getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "parallelism_config", whole
    if trainer.is_model_parallel:
        yield "a device_map over several devices", whole
    if args.n_gpu > 1:
        yield f"{args.n_gpu} GPUs in one process", "start a worker for each, with holdfast run --workers"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size", "windows would be of another size after a failure; give a batch size that fits"
    if args.train_sampling_strategy != "random":
        yield f"train_sampling_strategy={args.train_sampling_strategy!r}", "the run orders the samples; leave it out"
    if args.accelerator_config.split_batches:
        yield "split_batches", "the run divides a window among the workers; leave it out"
    if args.enable_jit_checkpoint:
        yield "enable_jit_checkpoint", "the run saves when it is asked to stop; leave it out"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        yield f"optim={optimizer!r}", "it steps inside backward, where no boundary is; choose another"
    if trainer.train_dataset is None:
        yield "train_dataset=None", "give it a dataset with a length and numbered samples"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        yield "a model that was trained before", "call protect() before train(), once"


def _check_world(trainer: Any, run: Run) -> None:
    if trainer.args.world_size != run.world_size:
        raise BadInput(
            f"the Trainer counts {trainer.args.world_size} of {run.world_size} workers: on CPUs give "
            "TrainingArguments(use_cpu=True)"
        )
    if run.is_live:
        raise BadInput(
            "a protected Trainer does not go with live recovery: survivors cannot mend the Trainer's own collectives; "
            "choose --recovery restart"
        )


class _Protection:
    """The methods of a protected Trainer that are replaced: its source of batches and its step boundaries."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer, self._run = trainer, run
        self._windows: Windows | None = None
        self._prepared: tuple[Any, Windows] | None = None
        self._trained = 0  # steps of the first epoch that were trained before this attempt
        self._progress = TransformersProgress(trainer, run)
        self._original: dict[str, Callable[..., Any]] = {}
        trainer.accelerator.prepare_model = functools.partial(self._replicate, trainer.accelerator.prepare_model)
        trainer.callback_handler.callbacks.insert(0, _Boundary(self._progress, self._where, run))

    def methods(self) -> dict[str, Callable[..., Any]]:
        """The Trainer's methods that are replaced, by name."""
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
            raise BadInput(f"a protected Trainer does not go with {name}: the run goes on from its own snapshots")
        if self._prepared:
            raise BadInput("train() was called before: a run trains once, over all its epochs")
        return self._original["train"](None, None, *args, **options)

    def _loader(self) -> Windows:
        trainer = self._trainer
        self._windows = Windows(trainer.train_dataset, self._global_batch, trainer.args.gradient_accumulation_steps)
        return self._windows

    @property
    def _global_batch(self) -> int:
        args = self._trainer.args
        return int(args.per_device_train_batch_size * self._run.world_size * args.gradient_accumulation_steps)

    def _replicate(self, prepare: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
        """Have Accelerate do all it does with a model but wrap it; the run replicates it."""
        if options.pop("evaluation_mode", False):
            return prepare(model, *args, evaluation_mode=True, **options)
        handler = self._trainer.accelerator.ddp_handler
        ready = prepare(model, *args, evaluation_mode=True, **options)
        return self._run.replicate(ready, **(handler.to_kwargs() if handler else {}))

    def _begin(self, max_steps: int, updates: int, epochs: int, _resume: Any, trial: Any) -> tuple[int, int]:
        """Prepare all that is protected, have it back, and say with which epoch to begin."""
        trainer, windows = self._trainer, self._windows
        assert windows is not None
        self._original["_init_training_state"](max_steps, updates, epochs, None, trial)
        self._prepared = self._original["_prepare_for_training"](max_steps, windows, None)
        self._run.protect(
            model=trainer.model,
            optimizer=trainer.optimizer.optimizer,
            scheduler=trainer.lr_scheduler,
            **({"scaler": scaler} if (scaler := trainer.accelerator.scaler) is not None else {}),
            trainer=self._progress,
        )
        windows.begin(self._batches(windows, max_steps), self._progress.gather)
        if (done := trainer.state.global_step) == max_steps:
            return epochs, 0
        epoch, self._trained = divmod(done, updates)
        return epoch, 0

    def _batches(self, windows: Windows, max_steps: int) -> Batches:
        trainer = self._trainer
        args = trainer.args
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
        return self._run.batches(
            windows.dataset,
            global_batch=self._global_batch,
            steps=max_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            num_workers=args.dataloader_num_workers,
            collate_fn=windows.collate(collate),
        )

    def _prepare(self, *_: Any) -> tuple[Any, Windows]:
        assert self._prepared is not None
        return self._prepared

    def _batch_samples(self, batches: Iterator[Any], count: int, device: torch.device) -> tuple[list[Any], Any]:
        """The next batches; none for the steps of this epoch that were trained before this attempt."""
        if self._trained:
            self._trained -= 1
            return [], None
        progress.here.count_post()  # all ranks gather how many items there are
        samples: tuple[list[Any], Any] = self._original["get_batch_samples"](batches, count, device)
        return samples

    def _where(self) -> float:
        """Return the number of epochs that are trained after the current step, with a fraction."""
        assert self._windows is not None
        assert self._windows.last is not None
        at = self._windows.last
        return at.epoch + (at.cursor + 1) / self._windows.steps_per_epoch

    def _finish(self, *args: Any) -> Any:
        assert self._windows is not None
        self._windows.end(self._run)
        return self._original["_finalize_training"](*args)

    def _log(self, logs: dict[str, float], *args: Any) -> None:
        """Log as the Trainer does, but compute the final speeds from the steps of this attempt."""
        if "train_runtime" in logs and self._progress.begun:
            steps = self._trainer.state.global_step
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] *= (steps - self._progress.begun) / steps
        self._original["log"](logs, *args)


class TransformersProgress:
    """The progress of the Trainer as state: its counters, logs and running sums, and the state of its callbacks."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer = trainer
        self._ranks = EachRank(run.rank, run.world_size, self._sums)
        self._restored: Mapping[str, Any] | None = None
        self.begun = 0
        """The number of steps trained before this attempt."""

    def gather(self) -> None:
        """Before a boundary: tell all ranks this rank's running loss."""
        self._ranks.gather()

    def begin(self) -> None:
        """Go on where the Trainer has just set its sums to zero."""
        trainer, state = self._trainer, self._restored
        if state is None:
            return
        loss, flos = self._ranks.mine(state["ranks"])
        trainer._tr_loss.fill_(float(loss))
        trainer.current_flos = float(flos)
        trainer._total_loss_scalar = state["total_loss"]
        trainer._globalstep_last_logged = state["last_logged"]
        trainer._initial_global_step = trainer._initial_num_input_tokens_seen = 0
        trainer.args.eval_on_start = False  # it ran before the first step, and its result is in the state

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, without clock times."""
        trainer = self._trainer
        return {
            **{name: getattr(trainer.state, name) for name in _PROGRESS},
            "log_history": [_without_clocks(logs) for logs in trainer.state.log_history],
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks],
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            "ranks": self._ranks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; running sums are restored when training begins."""
        self._restored = state
        self.begun = state["global_step"]
        for name in (*_PROGRESS, "log_history"):
            setattr(self._trainer.state, name, state[name])
        for callback, attributes in zip(self._callbacks, state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    @property
    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def _sums(self) -> torch.Tensor:
        loss: torch.Tensor = self._trainer._tr_loss
        return torch.stack([loss.double(), loss.new_tensor(self._trainer.current_flos, dtype=torch.float64)])


class _Boundary(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """A callback that runs before all others of the Trainer."""

    def __init__(self, trainer: TransformersProgress, where: Callable[[], float], run: Run) -> None:
        self._progress, self._where, self._run = trainer, where, run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore the running sums, which the Trainer has set to zero."""
        self._progress.begin()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Set the epoch to that of the run, because the Trainer counts only the batches of this attempt."""
        state.epoch = self._where()

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Record the logged loss in the run's history."""
        if logs and "loss" in logs:
            self._run.log(loss=logs["loss"])


def _without_clocks(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if not name.endswith(_CLOCKS)}
