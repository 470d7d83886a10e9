"""A script in which the last rank shares its processor with other work: `shared_core_script.py STEPS`.

Every rank computes for 5 ms of processor time in a step, on a processor of its own, but the last rank waits for its
processor half of the time.
"""

import os
import subprocess
import sys
import time

import torch
from torch import nn

import holdfast as hf

COMPUTES = 0.005
SPINS_WHILE_ITS_PARENT_LIVES = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def main(steps: int) -> None:
    torch.set_num_threads(1)
    run = hf.attach()
    torch.manual_seed(0)
    model = run.replicate(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.protect(model=model, optimizer=optimizer)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[run.rank]})  # before the other work, which inherits it
    other = None
    if run.rank == run.world_size - 1:
        other = subprocess.Popen([sys.executable, "-c", SPINS_WHILE_ITS_PARENT_LIVES])
    for batch in run.batches(torch.randn(64, 8), global_batch=16, steps=steps):
        until = time.thread_time() + COMPUTES
        while time.thread_time() < until:
            pass
        optimizer.zero_grad()
        model(batch.data).pow(2).mean().backward()
        optimizer.step()
    if other:
        other.kill()
        other.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
