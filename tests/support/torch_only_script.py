"""A small training job on torch alone, for tests of the supervisor: it saves, resumes, stops, and fails as its task says.

Its argument is JSON: {"steps", "save_every", "pause", "patience", "faults": [{"attempt", "rank", "step", "do"}]}.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast import process, progress
from holdfast.checkpoint import manifest, snapshot
from holdfast.checkpoint.store import DirectoryStore
from holdfast.errors import NoSnapshot, StorageFailed
from holdfast.progress import Phase

DEFAULTS = {"steps": 12, "save_every": 4, "pause": 0.0, "patience": 60, "faults": []}
TASK = DEFAULTS | json.loads(sys.argv[1] if sys.argv[1:] else "{}")
OUT = Path(os.environ["HOLDFAST_OUT"])
RANK, WORLD, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "HOLDFAST_ATTEMPT"))


class Mistake(Exception):
    """An error of the script itself."""


def main() -> None:
    """Train from the newest snapshot to the last step."""
    fail(-1)
    join()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = DirectoryStore(OUT / "checkpoints")
    first = restore(store, net)
    note(event="attempt", first=first, world=WORLD, round=os.environ["HOLDFAST_ROUND"], pid=os.getpid())
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(
        timedelta(seconds=TASK["patience"])
    )  # only from here on, because starting takes longer
    progress.here.phase = Phase.TRAINING
    for step in range(first, TASK["steps"]):
        progress.here.pass_boundary(step)
        fail(step)
        if asked():
            save(store, step, net)
            sys.exit(process.PREEMPTED)
        if step > first and step % TASK["save_every"] == 0:
            save(store, step, net)
        torch.manual_seed(1000 * step + RANK)
        progress.here.count_post()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(event="step", step=step)
        time.sleep(TASK["pause"])
    save(store, TASK["steps"], net)
    note(event="done")


def join() -> None:
    """Create the process group, on a store with a prefix of this round."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = dist.PrefixStore("holdfast/" + os.environ["HOLDFAST_ROUND"], store)
    dist.init_process_group(
        "gloo", store=prefix, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=TASK["patience"])
    )


def restore(store: DirectoryStore, net: torch.nn.Module) -> int:
    """Load the newest snapshot; return its step."""
    fail(-2)
    try:
        found = snapshot.newest(store)
    except NoSnapshot:
        return 0
    net.load_state_dict(found.tensors)
    return found.step


def save(store: DirectoryStore, step: int, net: torch.nn.Module) -> None:
    """Save on rank 0 while the others wait, so that a failure after a save comes after its commit."""
    if RANK == 0 and step not in manifest.steps(store):
        snapshot.save(store, step, net.state_dict(), {})
    dist.barrier()


def asked() -> bool:
    """Return True if any rank was asked to stop."""
    progress.here.count_post()
    flag = torch.tensor(int(process.requested.is_set()))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def fail(step: int) -> None:
    """Fail if the task says so for this step; step -1 is after the group is formed, -2 after the restore."""
    for fault in TASK["faults"]:
        if (fault["attempt"], fault["rank"], fault["step"]) == (ATTEMPT, RANK, step):
            act(fault["do"])


def act(what: str) -> None:
    """Fail in the given way."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "exit":
        os._exit(137)
    elif what == "raise":
        raise Mistake(f"this line is wrong, says {object()} of {os.getpid()}")
    elif what == "other":
        raise Mistake("another line is wrong")
    elif what == "storage":
        raise StorageFailed("cannot read shard-00000-of-00001.safetensors: Input/output error")
    elif what == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif what == "orphan":
        child = subprocess.Popen(["sleep", "600"])
        note(event="child", pid=child.pid)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.exit(what)


def note(**what: object) -> None:
    """Append a line to the notes of this rank."""
    with (OUT / f"notes-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"attempt": ATTEMPT, **what}) + "\n")


if __name__ == "__main__":
    main()
