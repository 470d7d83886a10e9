"""A worker that is lost while all ranks save: the save is abandoned, or was complete, and the run goes on."""

from pathlib import Path

import pytest

from finished_run import events, failed_checks
from supervisor_process import SUPPORT, Start

# The worker that first has rank 2 writes its file of step 10 so slowly that it is killed in the middle of it.
SLOW = f"""
import os, sys, time
sys.path.insert(0, {str(SUPPORT)!r})
from training_script import Task, train
from holdfast.checkpoint import store
from holdfast.train.attach import attach

write = store._write_file

def slowly(parts):
    for part in parts:
        yield part
        time.sleep(600)

def slow(path, parts):
    write(path, slowly(parts) if "step-00000010/shard-00002-of-00003" in path else parts)

store._write_file = slow
train(attach(), Task(epochs=7, patience=0.3))
"""


@pytest.mark.parametrize("recovery", ["replay", "forward", "skip"])
def test_a_save_is_abandoned_if_a_rank_is_lost_before_it_has_written_its_part(
    start: Start, tmp_path: Path, recovery: str
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    kill = {"step": 14, "kind": "kill", "targets": [2]}
    job = start(script=tmp_path / "slow.py", workers=3, recovery=recovery, save_every=10, failures=[kill])
    assert job.result()["verdict"] == "completed", job.stderr
    assert not events(job.out, "restart"), job.stderr
    assert "step 10 was not saved: a rank was lost" in job.stderr
    assert [event.what.step for event in events(job.out, "commit")] == [0, 20, 30, 40, 42]
    assert failed_checks(job.out) == []
    folders = {path.name for path in (job.out / "checkpoints").glob("step-*")}
    assert folders == {"step-00000040", "step-00000042"}
