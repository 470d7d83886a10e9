"""The training script whose failure costs `advice-check` predicts; arguments: network width, number of steps."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

WIDTH, STEPS = int(sys.argv[1]), int(sys.argv[2])
SAMPLES, BATCH = 2048, 64

source = torch.Generator().manual_seed(0)
labels = torch.randint(10, (SAMPLES,), generator=source)
points = torch.rand(10, 64, generator=source)[labels] + torch.randn(SAMPLES, 64, generator=source)

run = hf.attach()
model = run.replicate(
    nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(torch.utils.data.TensorDataset(points, labels), global_batch=BATCH, steps=STEPS):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss.item())
