"""A script that reads once, at its top, whether it is the main process, as nanoGPT does.

The main process evaluates in every fifth step, with random numbers, before it trains the step with dropout.
"""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

EVERY = 5
run = hf.attach(seed=3)
master_process, rank = run.is_main, run.rank
points = torch.randn(96, 20, generator=torch.Generator().manual_seed(1))
model = run.replicate(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 20)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
best = {"loss": float("inf")}
run.protect(model=model, optimizer=optimizer, best=best)
for batch in run.batches(points, global_batch=12, num_epochs=int(sys.argv[1])):
    if master_process and batch.step % EVERY == 0:
        x = points[torch.randint(len(points), (8,))]
        with torch.no_grad():
            best["loss"] = min(best["loss"], F.mse_loss(run.unwrap(model)(x), x).item())
        sys.stdout.write(f"evaluated {batch.step}\n")
    assert (run.is_main, run.rank) == (master_process, rank)
    loss = F.mse_loss(model(batch.data), batch.data)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.2 if run.world_size < int(os.environ["WORLD_SIZE"]) else 0.0)  # so that replacements arrive in time
