"""What a run puts on record so that an audit can tell a right run from one that only looks right."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from finished_run import events
from holdfast import progress
from holdfast.errors import BadInput
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position
from holdfast.train import attach as module
from holdfast.train.data.dataset import probe
from holdfast.train.data.loader import LoadRequest
from holdfast.train.run import Run
from holdfast.train.state.protected import Protected
from holdfast.train.step_log import Fingerprints, LoggedLoss, RankPlacement, StepLog, StepRecorder, WorkDone
from training_script import Crash

STEPS = 12
Body = Callable[[Run, nn.Module, torch.optim.Optimizer], Callable[[Any], None]]


def data(shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(16, 3, generator=generator) + shift, torch.randn(16, 1, generator=generator))


def training(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        x, y = batch
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(out: Path, body: Body = training, *, until: int = STEPS, lr: float | None = None) -> list[Any]:
    """Train some steps; what was put on record of them in this attempt."""
    run = module.attach(out, save_every=4, writer="blocking")
    model = run.replicate(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.protect(model=model, optimizer=optimizer)
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    step = body(run, model, optimizer)
    with suppress(Crash):
        for batch in run.batches(data(), global_batch=4, num_epochs=STEPS // 4):
            if batch.step == until:
                raise Crash
            step(batch)
    attempt = run.attempt
    run.close()
    return [event.what for event in events(out, "step") if event.what.attempt == attempt]


def test_a_step_that_is_trained_again_comes_out_with_the_same_fingerprint(tmp_path: Path) -> None:
    first = train(tmp_path, until=7)
    again = train(tmp_path)
    assert [step.step for step in again] == list(range(4, STEPS))
    assert [step.state for step in again[:3]] == [step.state for step in first[4:7]]
    assert len({step.state for step in first}) == 7


def test_state_that_was_not_protected_shows_in_the_steps_that_are_trained_again(tmp_path: Path) -> None:
    def decaying(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
        seen = 0.0  # nobody saves it

        def step(batch: Any) -> None:
            nonlocal seen
            seen += 1
            x, y = batch
            ((model(x) - y).square().mean() / seen).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    first = train(tmp_path, decaying, until=7)
    again = train(tmp_path, decaying)
    assert [step.state for step in again[:3]] != [step.state for step in first[4:7]]


def test_what_comes_back_is_compared_with_what_was_committed_when_the_first_step_begins(tmp_path: Path) -> None:
    train(tmp_path, until=7)
    train(tmp_path, until=7)
    train(tmp_path, lr=0.05)  # the script overwrites what came back
    commits = {event.what.step: event.what.state for event in events(tmp_path, "commit")}
    fresh, good, changed = (event.what for event in events(tmp_path, "recover"))
    assert (fresh.restored, fresh.state) == (None, None)
    assert (good.restored, good.state) == (4, commits[4])
    assert changed.restored == 4
    assert changed.state not in (None, commits[4])


def test_that_something_was_trained_is_on_record(tmp_path: Path) -> None:
    def idle(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
        train = training(run, model, optimizer)
        return lambda batch: None if batch.step else train(batch)

    trained, handed_out = train(tmp_path / "a"), train(tmp_path / "b", idle)
    assert [step.stepped for step in trained] == [1] * STEPS
    assert len({step.state for step in trained}) == STEPS
    assert {(step.reduced, step.held, step.stepped) for step in handed_out[1:]} == {(0, 0, 0)}
    assert len({step.state for step in handed_out}) == 1


def test_a_replicated_model_that_is_not_protected_is_refused(tmp_path: Path) -> None:
    run = module.attach(tmp_path)
    first, second = run.replicate(nn.Linear(3, 1)), run.replicate(nn.Linear(3, 2))
    run.protect(model=first, optimizer=torch.optim.SGD([*first.parameters(), *second.parameters()]))
    with pytest.raises(BadInput, match=r"a replicated Linear is not protected \(weight; bias\): name it in protect"):
        run.batches(data(), global_batch=4, num_epochs=1)
    run.close()


def test_a_model_inside_of_a_protected_thing_is_protected(tmp_path: Path) -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self) -> dict[str, Any]:
            return {"model": self.model.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])

    run = module.attach(tmp_path)
    model = run.replicate(nn.Linear(3, 1))
    run.protect(trainer=Trainer(model))
    assert next(iter(run.batches(data(), global_batch=4, num_epochs=1))).step == 0
    run.close()


def test_a_probe_tells_a_data_set_from_another_and_draws_the_same_augmentation_each_time() -> None:
    class Augmented(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(each + torch.rand(()) for each in super().__getitem__(index))

    def digest(dataset: TensorDataset) -> str:
        return probe(dataset, 16, 0)

    assert digest(data()) == digest(data()) != digest(data(shift=1.0))
    assert digest(Augmented(*data().tensors)) == digest(Augmented(*data().tensors))
    assert probe({0: {"a": [1, "x", None, b"y", 2.5, True]}}, 1, 0) != probe(
        {0: {"a": [1, "x", None, b"y", 2.5]}}, 1, 0
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("touch", ["weight", "bias", "running_mean"])
def test_every_part_of_a_model_has_its_values_in_the_fingerprint(touch: str) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    fingerprints = Fingerprints(Protected({"model": model}))
    before = fingerprints.take().digest()
    assert fingerprints.take().digest() == before
    with torch.no_grad():
        dict([*model[1].named_parameters(), *model[1].named_buffers()])[touch].add_(1)
    after = fingerprints.take().digest()
    assert (after[:16] == before[:16]) == (touch == "running_mean")  # parameters; then buffers
    assert (after[16:] == before[16:]) == (touch != "running_mean")
    model.half()  # other memory
    assert fingerprints.take().digest() != after


def test_a_fingerprint_stays_what_it_was_in_earlier_versions() -> None:
    """A run that a newer version goes on with compares the steps that it trains again with those on record."""
    model = nn.Module()
    kinds = (torch.float32, torch.bfloat16, torch.complex64, torch.float64, torch.float16, torch.float32)
    for number, kind in enumerate(kinds):
        values = torch.arange(1, 60 - 10 * number, dtype=torch.float64)
        model.register_parameter(f"p{number}", nn.Parameter(values.to(kind)))
    model.register_parameter("turned", nn.Parameter(torch.arange(12.0).view(3, 4).t()))
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("empty", torch.tensor([]))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    assert Fingerprints(Protected({"model": model})).take().digest() == "c86faedbd6341fb769236f5283e06868"


def test_state_that_is_no_model_is_fingerprinted_whole() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    counter = Counter()
    fingerprints = Fingerprints(Protected({"counter": counter}))
    before = fingerprints.take().digest()
    counter.count += 1
    assert fingerprints.take().digest() != before


def test_an_optimizer_that_trains_a_protected_model_must_be_protected_too(tmp_path: Path) -> None:
    run = module.attach(tmp_path)
    model = run.replicate(nn.Linear(3, 1))
    run.protect(model=model)
    step = training(run, model, torch.optim.AdamW(model.parameters()))
    batch = next(batches := iter(run.batches(data(), global_batch=4, num_epochs=1)))
    with pytest.raises(BadInput, match="AdamW trains a protected model and is not protected: name it in protect"):
        step(batch)
    batches.close()  # type: ignore[attr-defined]  # a generator
    run.close()


def test_a_schedule_of_a_protected_optimizer_must_be_protected_too(tmp_path: Path) -> None:
    run = module.attach(tmp_path)
    model = run.replicate(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match="optimizer has a learning-rate scheduler that is not protected"):
        run.batches(data(), global_batch=4, num_epochs=1)
    run.close()


def test_a_state_is_saved_only_where_no_gradients_wait_for_their_optimizer(tmp_path: Path) -> None:
    def by_hand(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
        count = 0  # starts anew with every attempt, as `enumerate` does

        def step(batch: Any) -> None:
            nonlocal count
            count += 1
            x, y = batch
            ((model(x) - y).square().mean() / 3).backward()
            if count % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()

        return step

    whole = train(tmp_path / "whole", by_hand)
    train(tmp_path / "parts", by_hand, until=8)
    again = train(tmp_path / "parts", by_hand)
    saved = [event.what.step for event in events(tmp_path / "parts", "commit")]
    assert saved == [0, 6, 9, STEPS]  # not 4 and 8, where gradients wait
    assert [step.state for step in again] == [step.state for step in whole[6:]]


@pytest.mark.parametrize("in_collectives", [None, 2.0])
def test_the_own_time_of_a_step_leaves_out_waits_for_other_ranks_and_for_a_processor(
    in_collectives: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "here", progress.Progress())
    clock = iter([10.0, 16.0, 18.0])
    if in_collectives:
        clock = iter([10.0, 18.0])  # no moment is known at which all gradients are computed
    waits: Any = SimpleNamespace(begin=lambda: None, end=lambda seconds: 1.0 if seconds == 6.25 else 0.0)
    record: Any = SimpleNamespace(append=lambda *_: None, flush=lambda: None)
    live: Any = SimpleNamespace(take_waited=lambda: in_collectives, end_step=lambda _: None, is_dropped=lambda _: False)
    log = StepLog(record, Fingerprints(None), 1, RankPlacement(0, 2))
    work = WorkDone([], cast(Protected, None))
    steps = StepRecorder(log, work, LoggedLoss(), live, None, lambda: next(clock), waits)
    steps.request()
    steps.begin(3, Position(), LoadRequest(np.arange(1), [0], Samples(1), 0), [], data=0.25, stall=0.0)
    if not in_collectives:
        steps.reach_last_gradient()
    steps.end()
    work.close()
    assert progress.here.own_time(3) == 5.25
