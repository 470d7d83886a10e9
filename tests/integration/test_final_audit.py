"""`holdfast run` ends with the verdict of the audit, and a signal after the end does not change its exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.audit.verdicts import Finding
from holdfast.cli import final_audit as module
from holdfast.cli.final_audit import AUDIT_FAILED, as_lines, final_audit
from holdfast.runs.config import RunConfig
from holdfast.supervise.stop_signals import stop_signals
from supervisor_process import SUPPORT, StartCommand

COUNTING = """
import torch
import torch.nn.functional as F
import holdfast as hf
run = hf.attach()
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
model = run.replicate(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
for i, (x, y) in enumerate(run.batches(data, global_batch=16, num_epochs=2)):
    if i % 4 == 0:  # the count begins again after a restart, so another step has the extra forward pass
        with torch.no_grad():
            model(x)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_run_whose_loop_counts_by_itself_ends_with_a_failed_audit_and_status_3(
    start_command: StartCommand, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(COUNTING)
    arguments = (
        "--save-every",
        3,
        "--writer",
        "blocking",
        "--inject",
        "kill@5",
        "--out",
        tmp_path / "out",
        tmp_path / "train.py",
    )
    for _ in range(2):  # the second command finds the run complete, and says the same
        ran = start_command("run", *arguments)
        assert ran.wait() == AUDIT_FAILED, ran.stderr
        assert "\naudit: fail\n  repeated steps agree: " in ran.stdout
        assert "state of the buffers, such as BatchNorm's averages, but with the same parameters" in ran.stdout
        assert f"next: holdfast rehearse {tmp_path / 'train.py'} names the first tensor that differs" in ran.stdout
        assert ran.stdout.splitlines()[-1] == f"run: {tmp_path / 'out'}"
    audited = start_command("audit", tmp_path / "out")
    assert audited.wait() == 1, audited.stderr
    assert f"next: holdfast rehearse {tmp_path / 'train.py'} names" in audited.stdout


def test_a_correct_run_ends_with_a_passed_audit(start_command: StartCommand, tmp_path: Path) -> None:
    options, script = ("--save-every", 5, "--inject", "kill@7", "--out", tmp_path), SUPPORT / "training_script.py"
    ran = start_command("run", *options, script, "--", json.dumps({"epochs": 2}))
    assert ran.wait() == 0, ran.stderr
    assert ran.stdout.splitlines()[-2:] == ["audit: pass", f"run: {tmp_path}"]


def test_a_step_that_the_loop_left_out_is_followed_by_what_to_change() -> None:
    findings = [Finding("every_step_was_trained", "fail", "step 3 ..."), Finding("one_plan", "pass", "")]
    lines, code = as_lines(findings, RunConfig(script="train.py"), "holdfast audit a")
    assert code == AUDIT_FAILED
    assert lines[:2] == ("audit: fail", "  every step was trained: step 3 ...")
    assert "micro_batches=4" in lines[2]
    assert lines[3:] == ("  next: holdfast audit a shows every check",)


def test_the_audit_of_a_huge_history_is_left_to_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "rank-0.jsonl").write_text("x" * 100)
    monkeypatch.setattr(module, "MOST_BYTES", 99)
    audit = final_audit(tmp_path, RunConfig(script="train.py"), 1, lambda _: None)
    assert audit.exit_code == 0
    assert audit.lines == (f"audit: not run, because the history has 0 MB: holdfast audit {tmp_path}",)


def test_a_signal_skips_the_audit_of_a_completed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_verdict", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with stop_signals.listening():
        audit = final_audit(tmp_path, RunConfig(script="train.py"), 1, lambda _: None)
    assert audit == ((f"audit: interrupted; the run itself is complete: holdfast audit {tmp_path}",), 0)


LATE = """
import os, signal
from holdfast.supervise.stop_signals import stop_signals
with stop_signals.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    stop_signals.ignore()
os.kill(os.getpid(), signal.SIGTERM)
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)  # while the interpreter ends
last = Last()
"""


def test_a_signal_that_arrives_while_a_completed_run_ends_does_not_change_its_status() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], timeout=60, check=False).returncode == 0
