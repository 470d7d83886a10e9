"""A loop in which one rank becomes slower: `train.py STEPS RANK SINCE FACTOR`. A replacement of that rank is fast again.

The work of a step is real: a model's forward and backward, repeated, so the ranks compete for processors. The slow rank
also sleeps for FACTOR - 1 times the processor time that it computed.
"""

import os
import sys
import time

import torch
from torch import nn

import holdfast as hf

REPEATS = 16  # so that nearly all of a rank's own time is processor time


def main(steps: int, rank: int, since: int, factor: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = hf.attach()
    body = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    model = run.replicate(body)
    optimizer = torch.optim.AdamW(model.parameters())
    run.protect(model=model, optimizer=optimizer)
    samples = torch.randn(1024, 256)
    is_first_process = "HOLDFAST_JOINS" not in os.environ
    for batch in run.batches(samples, global_batch=128, steps=steps):
        began = time.thread_time()
        for _ in range(REPEATS):
            torch.autograd.grad(body(batch.data).pow(2).mean(), list(body.parameters()))
        loss = model(batch.data).pow(2).mean()
        if run.rank == rank and is_first_process and batch.step >= since:
            time.sleep((factor - 1) * (time.thread_time() - began) * (REPEATS + 1) / (REPEATS + 1 / 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), float(sys.argv[4]))
