"""Live recovery where it is not possible: a failure is survived by a restart, and the run says so from the start."""

from pathlib import Path

from finished_run import events, failed_checks
from supervisor_process import SUPPORT, Start

SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(SUPPORT)!r})
from holdfast.distributed import nccl_link as device_link
device_link.why_not = lambda backend: "this NCCL cannot abort"
from holdfast.train.attach import attach
from training_script import Task, train
train(attach(), Task(**json.loads(sys.argv[1])))
"""


def test_a_backend_without_live_recovery_restarts_after_a_failure(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    how = {"workers": 2, "recovery": "forward", "save_every": 5}
    job = start({"epochs": 4}, script=script, failures=[{"step": 12, "kind": "kill", "targets": [1]}], **how)
    assert job.result() == job.result() | {"verdict": "completed", "attempts": 2}, job.stderr
    assert "--recovery forward is not possible here (this NCCL cannot abort)" in job.stderr
    assert len(events(job.out, "restart")) == 1
    assert failed_checks(job.out) == []
