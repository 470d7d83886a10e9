"""Options of a trainer that cannot be exact are refused in one line, before anything is trained."""

import warnings
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from holdfast.errors import BadInput

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages: they are none of ours


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Trainer of Hugging Face, with nothing to refuse."""
    with warnings.catch_warnings(action="ignore"):
        from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(tmp_path_factory.mktemp("files")), use_cpu=True, save_strategy="no")
    return Trainer(model=torch.nn.Linear(2, 2), args=arguments, train_dataset=[{"x": torch.zeros(2)}] * 16)


REFUSED = {
    "auto_find_batch_size": True,
    "train_sampling_strategy": "group_by_length",
    "enable_jit_checkpoint": True,
    "optim": "lomo",
    "deepspeed": "ds.json",
    "parallelism_config": object(),
    "accelerator_config": SimpleNamespace(split_batches=True),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_of_transformers(trainer: Any, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.trainers.transformers import protect

    monkeypatch.setattr(trainer.args, option, REFUSED[option])
    named = {"accelerator_config": "split_batches"}.get(option, option)
    with pytest.raises(BadInput, match=rf"^a protected Trainer does not support {named}.*: .*$"):
        protect(trainer)


def test_sharding_of_transformers_that_is_not_fsdp2(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import ParallelismConfig

    from holdfast.trainers.transformers import protect

    monkeypatch.setattr(trainer.args, "fsdp", True)
    monkeypatch.setattr(trainer.args, "fsdp_plugin_args", {"fsdp_version": 1})
    with pytest.raises(BadInput, match=r"^a protected Trainer does not support fsdp of version 1: .* 2}\.$"):
        protect(trainer)
    monkeypatch.setattr(trainer.args, "fsdp_plugin_args", {"fsdp_version": 2})
    monkeypatch.setattr(trainer.args, "parallelism_config", ParallelismConfig(dp_shard_size=2, tp_size=2))
    with pytest.raises(
        BadInput, match=r"^a protected Trainer does not support parallelism_config: every worker trains"
    ):
        protect(trainer)


def test_a_checkpoint_of_the_trainers_own(trainer: Any) -> None:
    from holdfast.trainers.transformers import protect

    before = dict(vars(trainer))
    protect(trainer)
    with pytest.raises(BadInput, match="resume_from_checkpoint: the run resumes from its own snapshots"):
        trainer.train(resume_from_checkpoint=True)
    vars(trainer).clear()
    vars(trainer).update(before)


@pytest.fixture
def lightning() -> Iterator[Any]:
    with warnings.catch_warnings(action="ignore"):
        import lightning

        yield lightning


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "max_epochs": 1,
}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"limit_train_batches": 2}, "limit_train_batches"),
        ({"overfit_batches": 1}, "overfit_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"max_time": timedelta(hours=1)}, "max_time"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"strategy": "ddp_spawn", "devices": 2}, "strategies that start processes themselves"),
    ],
)
def test_an_option_of_lightning(lightning: Any, options: dict[str, Any], named: str) -> None:
    from holdfast.trainers.lightning import protect

    with pytest.raises(BadInput, match=f"^a protected Trainer does not support .*{named}.*: .*$"):
        protect(lightning.Trainer(**QUIET | options))


def test_tensor_parallelism_of_lightning(lightning: Any) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from holdfast.trainers.lightning import protect

    options = {"strategy": ModelParallelStrategy(), "devices": 2}
    with pytest.raises(BadInput, match=r"^a protected Trainer does not support tensor parallelism: .*=1\.$"):
        protect(lightning.Trainer(**QUIET | options))


def module(lightning: Any, **attributes: Any) -> Any:
    """A module that is trained by its Trainer, but for some attributes."""

    def step(self: Any, batch: Any) -> Any:
        return self.layer(batch[0]).sum()

    def optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    body = {"training_step": step, "configure_optimizers": optimizers, **attributes}
    made = type("Module", (lightning.LightningModule,), body)()
    made.layer = torch.nn.Linear(2, 2)
    return made


DATA = TensorDataset(torch.zeros(8, 2))


@pytest.mark.parametrize(
    ("attributes", "loader", "named"),
    [
        ({}, DataLoader(DATA), "a loader with a SequentialSampler"),
        ({}, DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 8, 8)), "a loader with a WeightedRandomSampler"),
        ({}, [DataLoader(DATA), DataLoader(DATA)], "a list to train from"),
        ({"automatic_optimization": False}, DataLoader(DATA, shuffle=True), "automatic_optimization=False"),
        ({"on_save_checkpoint": lambda *_: None}, DataLoader(DATA, shuffle=True), "on_save_checkpoint of a module"),
    ],
)
def test_a_module_or_loader_of_lightning(lightning: Any, attributes: dict[str, Any], loader: Any, named: str) -> None:
    from holdfast.trainers.lightning import protect

    trainer = protect(lightning.Trainer(**QUIET))
    with pytest.raises(BadInput, match=f"^a protected Trainer does not support {named}: .*$"):
        trainer.fit(module(lightning, **attributes), loader)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (type("FSDPStrategy", (), {})(), "FSDPStrategy: its state cannot be saved"),
        (
            type("ModelParallelStrategy", (), {"_tensor_parallel_size": "auto", "num_processes": 2})(),
            "tensor parallelism, because workers train different samples",
        ),
    ],
)
def test_a_strategy_of_fabric(strategy: Any, reason: str) -> None:
    from holdfast.trainers.fabric import attach

    with pytest.raises(BadInput, match=f"^a run (on Fabric )?does not support .*{reason}"):
        attach(SimpleNamespace(strategy=strategy, world_size=1))


def test_more_workers_than_the_trainer_counts(lightning: Any) -> None:
    from holdfast.trainers.lightning import protect

    with pytest.raises(BadInput, match="configured for 2 workers, and 1 were started"):
        protect(lightning.Trainer(**QUIET | {"strategy": "ddp", "devices": 2}))
