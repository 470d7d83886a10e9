"""State that changes in training and is left out of `protect` is refused in the first steps; nothing else is."""

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from attached_runs import attach, close_attached_runs  # noqa: F401 - an autouse fixture
from holdfast.errors import BadInput
from holdfast.train.observe import unprotected_state

Work = Callable[[], object]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer, each_step: Work, steps: int = 6) -> None:
    """Train a few steps, and call `each_step` at the end of each."""
    for x, y in run.batches(TensorDataset(torch.randn(24, 3), torch.randn(24, 1)), global_batch=4, steps=steps):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        each_step()
        optimizer.zero_grad()


class Shadow:
    """An average of the parameters in a class of one's own, as many scripts have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: value.data.clone() for name, value in model.named_parameters()}

    def update(self) -> None:
        for name, value in self.model.named_parameters():
            self.shadow[name] = (0.1 * value.data + 0.9 * self.shadow[name]).clone()


class StatefulShadow(Shadow):
    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.shadow.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


class Counter:
    """Something of one's own in protect(), which could hold anything."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Total(nn.Module):
    """A metric that keeps its sum in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def reset(self) -> None:
        self.total.zero_()


def averaged(ema: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mean, value in zip(ema.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 0.1)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """A run with a model and an optimizer, neither of them protected yet."""
    run = attach(tmp_path)
    model = network()
    return run, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_an_averaged_model_left_out_of_protect_is_refused(parts: Any) -> None:
    run, model, optimizer = parts
    ema = AveragedModel(model)
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(
        BadInput, match=r"^ema in .*\(AveragedModel\) changes in training and is not protected: name it in"
    ):
        train(run, model, optimizer, lambda: ema.update_parameters(model))


def test_an_averaged_model_is_refused_before_its_averaging_begins(parts: Any) -> None:
    run, model, optimizer = parts
    swa = AveragedModel(model)
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match=r"as in protect\(\.\.\., swa=swa\)"):
        train(run, model, optimizer, lambda: None)
    assert swa.n_averaged == 0


def test_a_copy_of_the_model_that_is_averaged_by_hand_is_refused(parts: Any) -> None:
    run, model, optimizer = parts
    teacher = copy.deepcopy(model)
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match=r"teacher in .*\(Sequential\) changes in training"):
        train(run, model, optimizer, lambda: averaged(teacher, model))


def test_an_average_in_a_class_of_ones_own_is_refused(parts: Any) -> None:
    run, model, optimizer = parts
    ema = Shadow(model)
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match=r"ema in .*\(Shadow\).*give Shadow the methods state_dict and load_state_dict"):
        train(run, model, optimizer, ema.update)


def test_an_average_in_a_list_that_is_updated_in_place_is_refused(parts: Any) -> None:
    run, model, optimizer = parts
    means = [value.detach().clone() for value in model.parameters()]
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match=r"means in .*\(list\) changes in training"):
        train(run, model, optimizer, lambda: torch._foreach_lerp_(means, [v.detach() for v in model.parameters()], 0.1))


def test_a_gradient_scaler_left_out_of_protect_is_refused(parts: Any) -> None:
    run, model, optimizer = parts
    scaler = torch.amp.GradScaler("cpu")
    run.protect(model=model, optimizer=optimizer)

    def scaled() -> None:
        for x, y in run.batches(TensorDataset(torch.randn(24, 3), torch.randn(24, 1)), global_batch=4, steps=6):
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(
        BadInput, match=r"scaler in .*\(GradScaler\) changes in training.*protect\(\.\.\., scaler=scaler\)"
    ):
        scaled()


def test_two_forgotten_objects_are_named_in_one_line(parts: Any) -> None:
    run, model, optimizer = parts
    ema, second = AveragedModel(model), copy.deepcopy(model)
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match=r"change in training and are not protected: name them in protect\(\), as in"):
        train(run, model, optimizer, lambda: (ema.update_parameters(model), averaged(second, model)))


def test_a_second_model_with_an_optimizer_of_its_own_is_refused(parts: Any) -> None:
    run, model, optimizer = parts
    critic = nn.Linear(2, 1)
    steps = torch.optim.Adam(critic.parameters())
    run.protect(model=model, optimizer=optimizer)

    def both() -> None:
        critic(torch.ones(1, 2)).sum().backward()
        steps.step()
        steps.zero_grad()

    with pytest.raises(BadInput, match=r"critic in .*\(Linear\), steps in .*\(Adam\)|critic in .*\(Linear\) changes"):
        train(run, model, optimizer, both)


# Sharded models.


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[tuple[Any, nn.Module, torch.optim.Optimizer]]:
    """A run whose model and optimizer are sharded and protected."""
    run = attach(tmp_path)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.protect(model=model, optimizer=optimizer)
    yield run, model, optimizer
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_second_sharded_model_with_an_optimizer_of_its_own_is_refused(sharded: Any) -> None:
    run, model, optimizer = sharded
    critic = nn.Linear(2, 1)
    fully_shard(critic, mesh=run.mesh)
    steps = torch.optim.Adam(critic.parameters())

    def both() -> None:
        critic(torch.ones(1, 2)).sum().backward()
        steps.step()
        steps.zero_grad()

    with pytest.raises(
        BadInput, match=r"critic in .*\(FSDPLinear\), steps in .*\(Adam\)|critic in .*\(FSDPLinear\) ch"
    ):
        train(run, model, optimizer, both)


@pytest.mark.parametrize("copied", [torch.Tensor.clone, lambda value: value.to_local().clone()], ids=["whole", "local"])
def test_an_average_of_sharded_parameters_is_refused(sharded: Any, copied: Callable[[Any], torch.Tensor]) -> None:
    run, model, optimizer = sharded
    shadow = [copied(value.detach()) for value in model.parameters()]

    def averaged() -> None:
        for mean, value in zip(shadow, model.parameters(), strict=True):
            mean.lerp_(value.detach() if type(mean) is type(value.data) else value.detach().to_local(), 0.1)

    with pytest.raises(BadInput, match=r"^shadow in .*\(list\) changes in training and is not protected"):
        train(run, model, optimizer, averaged)


def test_the_shards_of_a_protected_model_pass(sharded: Any) -> None:
    run, model, optimizer = sharded
    shards = [value.to_local() for value in model.parameters()]
    train(run, model, optimizer, lambda: None)
    assert len(shards) == 4


def test_a_scheduler_is_missed_even_if_an_object_of_ones_own_is_protected(parts: Any) -> None:
    run, model, optimizer = parts
    schedule = StepLR(optimizer, 3)
    run.protect(model=model, optimizer=optimizer, counter=Counter())
    with pytest.raises(BadInput, match=r"schedule in .*\(StepLR\) changes in training"):
        train(run, model, optimizer, schedule.step)


def test_a_late_change_only_warns(
    parts: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprotected_state, "FIRST_STEPS", 2)
    run, model, optimizer = parts
    second, count = copy.deepcopy(model), [0]
    run.protect(model=model, optimizer=optimizer)

    def later() -> None:
        count[0] += 1
        if count[0] > 4:
            averaged(second, model)

    with caplog.at_level(logging.WARNING):
        train(run, model, optimizer, later, steps=18)
    assert sum("second in" in record.getMessage() for record in caplog.records) == 1


# What is not refused


def test_everything_that_is_protected_passes(parts: Any) -> None:
    run, model, optimizer = parts
    ema, scaler, shadow = AveragedModel(model), torch.amp.GradScaler("cpu"), StatefulShadow(model)
    schedule = SequentialLR(optimizer, [first := ConstantLR(optimizer), second := LinearLR(optimizer)], [3])
    run.protect(model=model, optimizer=optimizer, ema=ema, scaler=scaler, shadow=shadow, schedule=schedule)

    def work() -> None:
        ema.update_parameters(model)
        shadow.update()
        schedule.step()
        scaler.scale(torch.ones(()))

    train(run, model, optimizer, work)
    assert first is not second


def test_objects_inside_a_protected_object_of_ones_own_pass(parts: Any) -> None:
    run, model, optimizer = parts

    class Training(Counter):
        def __init__(self) -> None:
            self.ema, self.shadow, self.schedule = AveragedModel(model), Shadow(model), StepLR(optimizer, 3)

    training = Training()
    ema, shadow = training.ema, training.shadow
    run.protect(model=model, optimizer=optimizer, training=training)
    train(run, model, optimizer, lambda: (ema.update_parameters(model), shadow.update(), training.schedule.step()))


def test_a_frozen_teacher_and_other_constants_pass(parts: Any) -> None:
    run, model, optimizer = parts
    teacher = network().eval().requires_grad_(False)
    initial = [value.detach().clone() for value in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.protect(model=model, optimizer=optimizer)
    train(run, model, optimizer, lambda: (teacher(torch.randn(4, 3)), scaler.update()))
    assert initial


def test_copies_that_the_script_refreshes_pass(parts: Any) -> None:
    run, model, optimizer = parts
    evaluated, previous = copy.deepcopy(model), Shadow(model)
    run.protect(model=model, optimizer=optimizer)

    def refresh() -> None:
        evaluated.load_state_dict(model.state_dict())
        previous.shadow = {name: value.data.clone() for name, value in model.named_parameters()}

    train(run, model, optimizer, refresh)


def test_gradients_that_are_kept_for_a_log_pass(parts: Any) -> None:
    run, model, optimizer = parts
    log = Shadow(model)
    log.shadow = {}
    run.protect(model=model, optimizer=optimizer)
    train(run, model, optimizer, lambda: log.shadow.update({n: p.grad.clone() for n, p in model.named_parameters()}))


def test_metrics_pass(parts: Any) -> None:
    run, model, optimizer = parts
    total, sums, confusion = Total(), {"loss": torch.zeros(())}, torch.zeros(3, 3)
    run.protect(model=model, optimizer=optimizer)
    train(run, model, optimizer, lambda: (total.total.add_(1), sums["loss"].add_(1), confusion.add_(1)))


def test_the_check_keeps_no_variable_of_the_script_alive(parts: Any) -> None:
    run, model, optimizer = parts
    run.protect(model=model, optimizer=optimizer)
    data = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    gone = []
    for x, y in run.batches(data, global_batch=4, steps=4):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        gone.append(weakref.ref(loss))
    del loss
    assert [each() for each in gone] == [None] * 4
