"""A script that changes protected state before the batches of each epoch.

It sets plain values to zero: a number and a tensor. With the argument `scheduler` it also steps a scheduler there.
"""

import sys

import torch
from torch import nn

import holdfast as hf

run = hf.attach(seed=1)
points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
model = run.replicate(nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
sums = {"loss": 0.0, "inputs": torch.zeros(8)}
run.protect(model=model, optimizer=optimizer, scheduler=scheduler, sums=sums)
for epoch in run.epochs(points, global_batch=12, num_epochs=4):
    sums["loss"] = 0.0
    sums["inputs"].zero_()
    if "scheduler" in sys.argv:
        scheduler.step()
    for batch in epoch:
        loss = (model(batch.data) - batch.data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sums["loss"] += loss.item()
        sums["inputs"] += batch.data.sum(0)
