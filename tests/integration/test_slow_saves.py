"""A state that takes longer to save or to read than anybody waits for a silent peer is saved, and goes on."""

import signal
from pathlib import Path

import pytest

from finished_run import events, failed_checks
from supervisor_process import SUPPORT, Start, wait_until

# Ten minutes for a save where a peer is given up after some: here 2.5 s and 1.5 s. In the first life the saves of one
# rank are slow, but for that of step 0, and in the next one its reading is.
SLOW = """
import os, sys, time, torch
from torch.utils.data import TensorDataset
from holdfast.checkpoint.store import DirectoryStore
from holdfast.distributed import ranks as world
from holdfast.train.attach import attach

world.BEAT = 0.05
what = "put" if os.environ["HOLDFAST_ATTEMPT"] == "1" else "open"
call = getattr(DirectoryStore, what)

def slow(self, name, *rest):
    if os.environ["RANK"] == sys.argv[3] and name.endswith(".safetensors") and not name.startswith("step-00000000/"):
        time.sleep(2.5)
    return call(self, name, *rest)

setattr(DirectoryStore, what, slow)
run = attach()
object.__setattr__(run._session.ranks, "patience", 1.5)
model = run.replicate(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
data = TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16.0))
for batch in run.batches(data, global_batch=8, num_epochs=int(sys.argv[1])):
    x, y = batch
    (model(x / 64).squeeze(1) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("slow", ["0", "1"])
def test_a_slow_last_save_is_waited_for(start: Start, tmp_path: Path, slow: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    job = start(script=tmp_path / "slow.py", workers=2, args=["3", "0", slow], save_every=1000)
    assert job.result()["verdict"] == "completed", job.stderr
    assert events(job.out, "detect") == []
    assert failed_checks(job.out) == []


@pytest.mark.parametrize("slow", ["0", "1"])
def test_a_slow_save_on_preemption_and_a_slow_restore_are_waited_for(start: Start, tmp_path: Path, slow: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    for life in (1, 2):
        job = start(script=tmp_path / "slow.py", workers=2, args=["100000", "0.01", slow], save_every=1_000_000)
        wait_until(lambda: len(job.events("attempt", "rank-1")) == life, "the next life")  # noqa: B023
        wait_until(lambda: job.events("step", "rank-1")[-1:] > job.events("recover", "rank-1")[-1:], "a step of it")  # noqa: B023
        job.signal(signal.SIGTERM)
        assert job.result()["verdict"] == "preempted", job.stderr
    assert events(job.out, "detect") == []
    first, second = (event.what.restored for event in events(job.out, "recover", "rank-1"))
    assert first is None
    assert second > 0


SLOW_DISK = f"""
import os, sys, time
sys.path.insert(0, {str(SUPPORT)!r})
from training_script import Task, train
from holdfast.train.attach import attach

fsync = os.fsync

def slow(file):
    name = os.readlink(f"/proc/self/fd/{{file}}")
    if "shard-00000-" in name or name.endswith(".jsonl"):  # one file of each save is enough
        time.sleep(2)
    fsync(file)

os.fsync = slow
train(attach(), Task(epochs=4, patience=0.3))
"""


KILLS = 2  # of the first writer and of a replacement; each takes ten seconds


def test_rank_0_is_replaced_repeatedly_on_a_slow_disk_and_no_other_worker_is_killed(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_DISK)
    kills = [{"step": 3 + 11 * number, "kind": "kill", "targets": [0]} for number in range(KILLS)]
    job = start(script=tmp_path / "slow.py", workers=3, recovery="forward", save_every=5, failures=kills)
    wait_until(lambda: job.over or len(job.events("detect")) >= KILLS, "all kills", within=300)
    assert job.result()["verdict"] == "completed", job.stderr
    assert [(event.what.kind, event.what.rank) for event in job.events("detect")] == [("signal", 0)] * KILLS
    assert not events(job.out, "restart"), job.stderr
    assert failed_checks(job.out) == []
