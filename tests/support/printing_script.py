"""A training script in which rank 0 prints the step after every step."""

import os
import time

import torch
import torch.nn.functional as F

import holdfast as hf

run = hf.attach()
points = torch.utils.data.TensorDataset(torch.randn(96, 20), torch.randint(5, (96,)))
model = run.replicate(torch.nn.Linear(20, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.protect(model=model, optimizer=optimizer)
for batch in run.batches(points, global_batch=16, num_epochs=7):
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    run.print(f"step {batch.step} by {os.getpid()}")
    time.sleep(
        0.3 if run.world_size < int(os.environ["WORLD_SIZE"]) else 0.0
    )  # those that are missing come before the last
