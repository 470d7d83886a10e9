"""Trouble with the storage is named, waited for where that helps, and never passed over in silence."""

import signal
from pathlib import Path

import pytest

from finished_run import events, failed_checks
from supervisor_process import SUPPORT, Start, StartCommand, wait_until

LOOP = SUPPORT / "training_script.py"
BROKEN = f"""
import errno, os, sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
from training_script import Task, train
from holdfast.checkpoint import store
from holdfast.train.attach import attach

write, error, marker = store._write_file, int(sys.argv[1]), Path(sys.argv[2])

def refuse(path, parts):
    if marker.exists() and "step-" in path and "step-00000000" not in path:
        raise OSError(error, os.strerror(error))
    write(path, parts)

store._write_file = refuse
train(attach(), Task(epochs=4, model="normed"))
"""
FULL = """
import sys
from pathlib import Path
from holdfast.supervise import disk_space
disk_space.has_room = lambda folder, size: not Path(sys.argv[-1]).exists()
"""


def test_a_run_whose_only_snapshot_is_damaged_says_that_it_starts_again(start: Start, tmp_path: Path) -> None:
    marker = tmp_path / "fast"
    task = {"epochs": 4, "pause": 0.2, "until": str(marker)}
    first = start(task, script=LOOP, workers=1, save_every=1000, keep_last=1)
    wait_until(lambda: bool(first.events("step", "rank-0")), "a step")
    first.signal(signal.SIGTERM)
    assert first.result()["verdict"] == "preempted", first.stderr
    (state,) = (first.out / "checkpoints").glob("step-*/shard-00000-of-00001.safetensors")
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    marker.touch()
    again = start(task, script=LOOP, workers=1, save_every=1000, keep_last=1)
    assert again.result()["verdict"] == "completed", again.stderr
    assert "training starts again at step 0" in again.stderr
    assert f"can be used ({state.parent.name}: " in again.stderr


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_shard_of_any_rank_makes_all_ranks_use_the_older_snapshot(
    start: Start, tmp_path: Path, rank: int, workers: int
) -> None:
    marker = tmp_path / "fast"
    task = {"epochs": 4, "pause": 0.2, "until": str(marker)}
    first = start(task, script=LOOP, workers=2, save_every=1000, keep_last=2)
    wait_until(lambda: bool(first.events("step", "rank-0")), "a step")
    first.signal(signal.SIGTERM)
    assert first.result()["verdict"] == "preempted", first.stderr
    shards = sorted((first.out / "checkpoints").glob(f"step-*/shard-0000{rank}-of-00002.safetensors"))
    assert len(shards) == 2, "the first boundary was saved, and the last one"
    shards[-1].write_bytes(shards[-1].read_bytes()[:-1] + b"?")
    marker.touch()
    again = start(task, script=LOOP, workers=workers, save_every=1000, keep_last=2)
    assert again.result()["verdict"] == "completed", again.stderr
    for number in range(workers):
        recovered = events(again.out, "recover", f"rank-{number}")[-1].what
        assert recovered.restored == 0
        assert [passed["name"] for passed in recovered.passed_over] == [f"{shards[-1].parent.name}/"]
    assert failed_checks(again.out) == []


def test_a_full_disk_is_waited_for_without_using_up_restarts(start_command: StartCommand, tmp_path: Path) -> None:
    script, marker, out = tmp_path / "broken.py", tmp_path / "full", tmp_path / "out"
    script.write_text(BROKEN)
    marker.touch()
    options = ("--workers", "2", "--save-every", "5", "--max-restarts", "1", "--out", out)
    run = start_command("run", *options, script, "--", "28", marker, before=FULL, together=True)
    wait_until(lambda: "the disk is full: waiting up to 10 minutes" in run.stdout, "the wait")
    marker.unlink()
    assert run.wait() == 0, run.stdout
    assert len(events(out, "restart")) == 1
    assert failed_checks(out) == []


def test_a_read_only_file_system_is_named_where_live_recovery_ends_because_of_it(start: Start, tmp_path: Path) -> None:
    script, marker = tmp_path / "broken.py", tmp_path / "read-only"
    script.write_text(BROKEN)
    marker.touch()
    job = start(script=script, workers=2, args=["30", str(marker)], recovery="replay", save_every=5, max_restarts=1)
    result = job.result()
    assert result["verdict"] == "gave-up", (result, job.stderr)
    assert "Read-only file system" in result["because"]
