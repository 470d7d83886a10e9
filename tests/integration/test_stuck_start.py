"""A run that cannot reach its first step says why: a sharded model is refused, and a minute of waiting is explained."""

import re
from pathlib import Path

import pytest

from supervisor_process import Start, StartCommand

SHARDED = """
import sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
import holdfast as hf

run = hf.attach()
how, moment = sys.argv[1:]

def shard(model):
    mesh = init_device_mesh("cpu", (run.world_size,))
    if how == "FSDP":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if how == "FSDP2":
        return fully_shard(model, mesh=mesh)
    model[0].weight = torch.nn.Parameter(distribute_tensor(model[0].weight, mesh, [Shard(0)]))
    return model

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
if moment == "before protect":
    model = shard(model)
if moment == "before replicate":
    model = run.replicate(shard(model))
run.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
if moment == "after protect":
    shard(model)
for batch in run.batches(torch.utils.data.TensorDataset(torch.zeros(8, 4)), global_batch=4, num_epochs=1):
    raise AssertionError("the first step began")
"""
WAITS = """
import time
import holdfast as hf

run = hf.attach()
if run.rank == 0:
    time.sleep(6)
run.sum(1)
"""
SOON = "from holdfast.supervise.workers import pool; pool.FIRST_STEP = 1"


@pytest.mark.parametrize(
    ("how", "moment", "recovery", "advice"),
    [
        ("FSDP", "before protect", "restart", "use fully_shard(model, mesh=run.mesh)"),
        ("FSDP", "before replicate", "restart", "use fully_shard(model, mesh=run.mesh)"),
        ("FSDP2", "before replicate", "restart", "leave out run.replicate()"),
        ("DTensor", "before replicate", "restart", "leave out run.replicate()"),
        ("FSDP2", "before protect", "replay", "choose --recovery restart"),
        ("FSDP2", "after protect", "replay", "choose --recovery restart"),
        ("DTensor", "before protect", "forward", "choose --recovery restart"),
    ],
)
def test_a_sharded_model_that_cannot_be_restored_is_refused_in_one_line(
    start: Start, tmp_path: Path, how: str, moment: str, recovery: str, advice: str
) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED)
    job = start(script=tmp_path / "sharded.py", workers=2, args=[how, moment], recovery=recovery)
    result = job.result()
    assert result["verdict"] == "refused", (result, job.stderr)  # exit status 2
    assert f"is sharded with {how}" in result["because"]
    assert advice in result["because"]
    assert "Traceback" not in job.stderr
    assert result["attempts"] == 1


def test_a_run_without_a_first_step_says_what_each_worker_does_and_where(
    start_command: StartCommand, tmp_path: Path
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    done = start_command("run", "--workers", "2", "--out", tmp_path / "out", script, before=SOON)
    assert done.wait() == 0, done.stderr
    assert done.stderr.count("no worker has reached its first step for 1 s") == 1
    doing = "runs the script, which has not come to its training loop"
    assert re.search(rf"rank 0 \(pid \d+\) {doing} \(waits.py:7\)", done.stderr), done.stderr
    assert re.search(rf"rank 1 \(pid \d+\) {doing} \(waits.py:8, which called ", done.stderr), done.stderr
