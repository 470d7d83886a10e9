"""What it trains on depends on the clock: no two runs are the same, killed or not."""

import time

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf

run = hf.attach()
model = run.replicate(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
    F.cross_entropy(model(x * (1 + 1e-3 * (time.time_ns() % 1000))), y).backward()
    optimizer.step()
    optimizer.zero_grad()
