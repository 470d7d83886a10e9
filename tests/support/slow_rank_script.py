"""A script in which one rank becomes slower from a given step on: `slow_rank_script.py STEPS RANK SINCE FACTOR [sharded]`.

A worker that replaces the slow one is as fast as the others. The work of a step is a pause of 10 ms.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast as hf

PAUSE = 0.01


def main(steps: int, rank: int, since: int, factor: float, *, is_sharded: bool = False) -> None:
    run = hf.attach()
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 4)
    model = fully_shard(model, mesh=run.mesh) if is_sharded else run.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.protect(model=model, optimizer=optimizer)
    samples = torch.randn(64, 8)
    is_first_process = "HOLDFAST_JOINS" not in os.environ
    for batch in run.batches(samples, global_batch=16, steps=steps):
        is_slow = run.rank == rank and is_first_process and batch.step >= since
        time.sleep(factor * PAUSE if is_slow else PAUSE)
        optimizer.zero_grad()
        model(batch.data).pow(2).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), float(sys.argv[4]), is_sharded="sharded" in sys.argv)
