"""Where a command and its script say different things one rule decides, and one line says which has no effect."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attached_runs import attach, run_to_end
from finished_run import different, events, failed_checks
from holdfast.errors import BadInput
from holdfast.runs import config
from holdfast.runs.config import RunConfig
from holdfast.train.attach import overridden, seed_of_run
from training_script import Task, train

pytestmark = pytest.mark.usefixtures("one_thread")
TASK = Task(epochs=1)


@pytest.mark.parametrize(
    ("given", "seed", "line"),
    [
        ((None, None, None, None), 0, None),
        ((None, None, 7, None), 7, None),
        ((None, 5, None, None), 5, None),
        ((3, None, None, None), 3, None),
        ((3, 3, 3, None), 3, None),
        ((None, 5, 7, None), 5, "the seed is 5 (attach(seed=5)): torch.manual_seed(7) has no effect."),
        ((3, 5, 7, None), 3, "(--seed 3): attach(seed=5) and torch.manual_seed(7) have no effect."),
        ((None, 5, None, 5), 5, None),
        ((None, None, 8, 7), 7, "(the one this run began with): torch.manual_seed(8) has no effect."),
    ],
)
def test_the_seed_is_the_commands_else_that_of_attach_else_the_scripts_own(
    given: Any, seed: int, line: str | None
) -> None:
    found, said = seed_of_run(*given)
    assert found == seed
    assert (said is None) == (line is None)
    assert (line or "") in (said or "")


def test_a_run_that_goes_on_has_the_seed_it_began_with() -> None:
    with pytest.raises(BadInput, match="the seed is 6, not 5 with which this run began"):
        seed_of_run(None, 6, None, 5)
    with pytest.raises(BadInput, match="does not fit 64 bits"):
        seed_of_run(None, -1, None, None)


def test_the_scripts_own_seed_counts_and_so_five_seeds_are_five_runs(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2), ("again", 1)):
        torch.manual_seed(seed)
        run_to_end(tmp_path / name, TASK)
    assert different(tmp_path / "a", tmp_path / "b")
    assert different(tmp_path / "a", tmp_path / "again") == []
    (plan,) = events(tmp_path / "a", "plan")
    assert plan.what.seed == 1
    run_to_end(tmp_path / "attached", TASK, seed=1)
    assert different(tmp_path / "a", tmp_path / "attached") == []


def test_a_seed_that_is_another_each_time_is_that_of_the_first_time_when_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(-1)
    train(attach(tmp_path, save_every=2), TASK, steps=3)
    torch.manual_seed(12)
    assert attach(tmp_path).seed == 2**64 - 1
    assert "torch.manual_seed(12) has no effect" in caplog.text
    assert not any("readable" in each for each in failed_checks(tmp_path))


def test_a_seed_after_attach_is_said_to_come_late(caplog: pytest.LogCaptureFixture) -> None:
    run = attach()
    torch.manual_seed(5)
    run.protect(model=nn.Linear(1, 1))
    next(run.batches(torch.zeros(8, 1), global_batch=2, num_epochs=1))  # type: ignore[arg-type]
    assert "torch.manual_seed(5) after attach() has no effect on the order of samples" in caplog.text
    assert "follow the seed 0 of the run: remove it, or write attach(seed=5)" in caplog.text
    assert "nothing is saved" in caplog.text


def test_the_runs_own_seed_after_attach_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = attach(seed=5)
    torch.manual_seed(5)
    run.protect(model=nn.Linear(1, 1))
    next(run.batches(torch.zeros(8, 1), global_batch=2, num_epochs=1))  # type: ignore[arg-type]
    assert "nothing is saved" in caplog.text
    assert "torch.manual_seed" not in caplog.text


def test_what_the_command_says_otherwise_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_OUT", str(tmp_path))
    monkeypatch.setattr(config, "_adopted", RunConfig(script="train.py", save_every=50, seed=4))
    with caplog.at_level(logging.WARNING):
        run = attach(Path("elsewhere"), save_every=10, keep_last=2, seed=6)
    assert run.seed == 4
    assert "the command says --save-every 50" in caplog.text
    assert "attach(save_every=10) and attach(out='elsewhere') have no effect" in caplog.text
    assert "attach(seed=6) has no effect" in caplog.text
    assert overridden({"writer": None, "keep_last": 2}, {"writer": "blocking", "keep_last": 2}) is None
