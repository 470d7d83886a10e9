"""A loop in nanoGPT's way: the samples become the run's, or stay the script's own; killed twice, the bits are the same."""

import random
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from attached_runs import attach
from finished_run import different, events, failed_checks
from holdfast.audit.verdicts import audit_run
from holdfast.errors import BadInput
from repository import EXAMPLES, lines
from supervisor_process import Start

CHANGED = 8
SMALL = ["--words", "60", "--batch", "8", "--accumulate", "2", "--evaluate-every", "5"]  # about 20 steps


@pytest.mark.parametrize("name", ["gpt", "gpt_own"])
def test_at_most_eight_lines_of_the_plain_script_are_changed(name: str) -> None:
    ours, plain = lines(name), lines("gpt_plain")
    new = [line for line in ours if line not in plain]
    gone = [line for line in plain if line not in ours]
    assert len(new) <= CHANGED, new
    assert [line for line in ours if line not in new] == [line for line in plain if line not in gone]


def test_the_plain_script_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt_plain.py", "--words", "40", *SMALL[2:]])
    runpy.run_path(str(EXAMPLES / "gpt_plain.py"), run_name="__main__")
    assert "of 2.996 without training" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "proved"),
    [
        ("gpt", "none repeated, missing or extra"),
        ("gpt_own", "which samples it drew is not checked"),
    ],
)
def test_killed_twice_it_ends_with_the_bits_of_a_run_that_never_failed(start: Start, name: str, proved: str) -> None:
    seed = time.time_ns() % 2**32
    steps = sorted(random.Random(seed).sample(range(1, 15), 2))
    how = {"script": EXAMPLES / f"{name}.py", "args": SMALL, "workers": 2, "save_every": 4}
    reference = start(out="reference", **how)
    job = start(failures=[{"step": step, "kind": "kill", "targets": [step % 2]} for step in steps], **how)
    for each in (reference, job):
        assert each.result().get("verdict") == "completed", (seed, each.stderr)
    assert job.result()["attempts"] == 3
    assert different(reference.out, job.out) == []
    assert failed_checks(job.out) == []
    (said,) = [each.because for each in audit_run(job.out) if each.check == "every_sample_trained_once"]
    assert proved in said
    assert {event.what.batch for event in events(job.out, "plan")} == {16}  # two micro-batches of 8


def test_a_script_that_draws_is_told_how_many_and_no_steps_are_refused(tmp_path: Path) -> None:
    run = attach(tmp_path)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    run.protect(model=model, optimizer=optimizer)
    with pytest.raises(BadInput, match="steps must be an integer of at least 1"):
        run.steps(0, global_batch=8)
    told = []
    for batch in run.steps(2, global_batch=8, micro_batches=2):
        told.append((batch.step, batch.data))
        model(torch.randn(batch.data, 1)).square().mean().backward()
        if batch.is_last:
            optimizer.step()
            optimizer.zero_grad()
    assert told == [(0, 4), (0, 4), (1, 4), (1, 4)]
    run.close()
