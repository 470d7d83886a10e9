"""A script that trains outside of a run is told that it is supervised only; what a failed rank said is in its log."""

from pathlib import Path

from finished_run import failed_checks
from supervisor_process import Start

OWN_LOOP = """
import torch
import holdfast as hf

run = hf.attach()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.protect(model=model, optimizer=optimizer)
for x in torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2):
    model(x).square().mean().backward()
    optimizer.step()
"""
FAILS_ONCE = """
import os
import torch

optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
optimizer.step()
if os.environ["HOLDFAST_ATTEMPT"] == "1":
    raise ValueError("the data set is elsewhere")
"""


def test_a_script_that_protects_and_trains_with_its_own_loader_is_told_so(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    job = start(script=script, workers=1)
    assert job.result() == {
        "verdict": "completed",
        "attempts": 1,
        "because": "all workers have finished; supervised only: restarted after failures, not checked",
    }
    assert job.stderr.count("supervised only: these steps do not come from run.batches()") == 1
    (said,) = failed_checks(job.out)
    assert "supervised only: the workers ended normally" in said


def test_failures_injected_into_a_script_that_is_only_supervised_are_said_to_have_no_effect(
    start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    job = start(script=script, workers=1, failures=[{"step": 3, "kind": "kill"}])
    assert job.result()["because"].endswith("--inject had no effect: failures strike in run.batches()")


def test_a_script_that_never_attaches_is_told_so_and_what_it_raised_is_in_its_log(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(FAILS_ONCE)
    job = start(script=script, workers=1)
    assert "supervised only" in job.result()["because"]
    assert job.stderr.count("supervised only: these steps") == 1
    log = (job.out / "logs" / "attempt-0001" / "rank-0.err").read_text()
    assert log.rstrip().endswith("ValueError: the data set is elsewhere")
    assert "plain.py" in log
    assert job.stderr.count("ValueError: the data set is elsewhere") == 1  # shown once, not from the log again
