"""Epochs as people write them: what a script does around the batches of an epoch is exact after a crash anywhere."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attached_runs import attach, attached
from epoch_training import BATCH, EPOCHS, SAMPLES, WINDOWS, Pushed, protected, step
from finished_run import different, events, failed_checks, last
from holdfast.errors import BadInput


class Crash(Exception):
    """What ends a training that is to go on later."""


class Progress:
    """What a script knows of how well it does, and whether it has had enough."""

    def __init__(self) -> None:
        self.best, self.bad = float("inf"), 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.bad = state["best"], state["bad"]


class Script:
    """A script with dropout, augmentation, a validation that draws, a schedule and early stopping.

    What it does before an epoch is no good manner: it counts once all the same.

    It crashes where it is told: before an epoch, in a step, or once it has done what it does after an epoch.
    """

    def __init__(self, out: Path, *, crash: tuple[str, int] | None = None, patience: int = 99) -> None:
        self.run = attach(out, save_every=1)
        self.crash, self.patience = crash, patience
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 6))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.progress, self.sums = Progress(), {"loss": torch.zeros(1), "steps": 0}
        self.run.protect(
            net=self.net, optimizer=self.optimizer, scheduler=self.scheduler, progress=self.progress, sums=self.sums
        )

    def train(self) -> list[int]:
        """The numbers of the epochs that it has gone through."""
        numbers = []
        for epoch in self.run.epochs(Pushed(), global_batch=BATCH, num_epochs=EPOCHS):
            self.may_crash("before", epoch.number)
            torch.rand(3)
            self.optimizer.param_groups[0]["weight_decay"] += 0.01
            self.sums["loss"].zero_()
            self.sums["steps"] = 0
            for batch in epoch:
                self.may_crash("step", batch.step)
                loss = F.mse_loss(self.net(batch.data), batch.data)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.run.log(loss=loss.item())
                self.sums["loss"] += loss.detach()
                self.sums["steps"] += 1
            self.validate()
            self.scheduler.step()
            self.may_crash("after", epoch.number)
            numbers.append(epoch.number)
        return numbers

    def validate(self) -> None:
        with torch.no_grad():
            loss = float(F.mse_loss(self.net(noise := torch.rand(4, 6)), noise))
        self.progress.bad = 0 if loss < 0.1 * self.progress.best else self.progress.bad + 1
        self.progress.best = min(loss, self.progress.best)
        if self.progress.bad >= self.patience:
            self.run.stop()

    def may_crash(self, where: str, number: int) -> None:
        if self.crash == (where, number):
            raise Crash


CRASHES = [
    *(("before", epoch) for epoch in range(EPOCHS)),
    *(("step", step) for step in range(WINDOWS * EPOCHS)),
    *(("after", epoch) for epoch in range(EPOCHS)),
]


@pytest.mark.parametrize("how", [{}, {"patience": 1}], ids=["to the end", "stopped early"])
def test_a_crash_anywhere_changes_no_bit_of_what_comes_out(tmp_path: Path, how: dict[str, Any]) -> None:
    whole = tmp_path / "whole"
    trained = Script(whole, **how).train()
    assert trained == list(range(len(trained)))
    assert failed_checks(whole) == []
    end = last(whole).step
    assert (end < WINDOWS * EPOCHS) == ("patience" in how)
    for crash in CRASHES:
        out = tmp_path / "-".join(map(str, crash))
        if crash[1] >= len(trained) * (WINDOWS if crash[0] == "step" else 1):
            continue
        with pytest.raises(Crash):
            Script(out, **how, crash=crash).train()
        attached.pop().close()
        again = Script(out, **how).train()
        assert again == [each for each in trained if each >= again[0]]
        assert different(whole, out) == []
        assert last(whole).extra["own"] == last(out).extra["own"]
        assert failed_checks(out) == []
        attached.pop().close()


def test_a_protected_tensor_that_is_set_to_zero_before_the_batches_keeps_its_sum_in_mid_epoch(tmp_path: Path) -> None:
    def train(crash: int | None = None) -> list[float]:
        run, net, total = attach(tmp_path, save_every=1), nn.Linear(6, 6), torch.zeros(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.protect(net=net, optimizer=optimizer, total=total)
        sums = []
        for epoch in run.epochs(Pushed(), global_batch=BATCH, num_epochs=2):
            total.zero_()
            for batch in epoch:
                if batch.step == crash:
                    raise Crash
                step(net, optimizer, batch.data)
                total += 1
            sums.append(total.item())
        return sums

    with pytest.raises(Crash):
        train(crash=WINDOWS + 2)
    attached.pop().close()
    assert train() == [WINDOWS]


def test_an_epoch_can_be_passed_where_a_script_passes_its_loader() -> None:
    run, *_ = protected()
    epochs = run.epochs(Pushed(), global_batch=BATCH, num_epochs=EPOCHS, micro_batches=2)
    assert (len(epochs), epochs.steps_per_epoch) == (EPOCHS, WINDOWS)
    for epoch in epochs:
        assert (len(epoch), len(epoch.dataset), epoch.steps_per_epoch) == (2 * WINDOWS, SAMPLES, WINDOWS)
        assert [batch.epoch for batch in epoch] == [epoch.number] * 2 * WINDOWS


def test_the_length_of_a_loop_does_not_depend_on_where_it_goes_on(tmp_path: Path) -> None:
    run, net, optimizer = protected(tmp_path, save_every=1)
    batches = run.batches(Pushed(), global_batch=BATCH, steps=5)
    assert (len(batches), batches.initial, batches.steps_per_epoch, len(batches.dataset)) == (5, 0, WINDOWS, SAMPLES)
    with suppress(Crash):
        for batch in batches:
            if batch.step == 4:
                raise Crash
            step(net, optimizer, batch.data)
    run.close()
    run, net, optimizer = protected(tmp_path, save_every=1)
    epoch = next(epochs := iter(run.epochs(Pushed(), global_batch=BATCH, steps=5)))
    assert (epoch.number, len(epoch), epoch.initial) == (1, 2, 1)
    assert [batch.step for batch in epoch] == [4]
    assert list(epochs) == []


def test_a_run_of_so_many_steps_ends_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    run, net, optimizer = protected(tmp_path)
    seen = []
    for epoch in run.epochs(Pushed(), global_batch=BATCH, steps=5):
        for batch in epoch:
            step(net, optimizer, batch.data)
            seen.append((batch.epoch, batch.cursor))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert failed_checks(tmp_path) == []
    assert [each.what.step for each in events(tmp_path, "done")] == [5]


@pytest.mark.parametrize("how", [{}, {"num_epochs": 2, "steps": 5}, {"steps": 0}, {"steps": 2.5}])
def test_how_long_to_train_is_said_once(how: dict[str, Any]) -> None:
    run, *_ = protected()
    with pytest.raises(BadInput, match=r"num_epochs=N or steps=N|steps must be an integer"):
        run.batches(Pushed(), global_batch=BATCH, **how)


def test_a_batch_that_is_fetched_ahead_is_refused(tmp_path: Path) -> None:
    run, net, optimizer = protected(tmp_path)
    batches = iter(run.batches(Pushed(), global_batch=BATCH, num_epochs=2))
    batch = next(batches)
    with pytest.raises(BadInput, match="before anything was done with the first"):
        next(batches)
    step(net, optimizer, batch.data)


def test_a_next_epoch_is_not_handed_out_before_this_one_is_trained(tmp_path: Path) -> None:
    run, net, optimizer = protected(tmp_path)
    epochs = iter(run.epochs(Pushed(), global_batch=BATCH, num_epochs=2))
    for batch in next(epochs):
        step(net, optimizer, batch.data)
        break
    with pytest.raises(BadInput, match=r"epoch 0 has 2 steps to train: .* call run\.stop\(\)"):
        next(epochs)


def test_a_second_loop_is_refused_with_the_way_to_write_it() -> None:
    run, *_ = protected()
    batches = run.batches(Pushed(), global_batch=BATCH, num_epochs=1)
    assert len(list(batches)) == WINDOWS
    with pytest.raises(BadInput, match=r"after the run had begun to train.*for epoch in run\.epochs"):
        run.batches(Pushed(), global_batch=BATCH, num_epochs=1)
    with pytest.raises(BadInput, match=r"come once: write for epoch in run\.epochs"):
        iter(batches)
