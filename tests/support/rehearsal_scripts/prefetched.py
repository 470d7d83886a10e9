"""The next batch is fetched before this one is trained, across the boundary of the step."""

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf

run = hf.attach()
model = run.replicate(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.protect(model=model, optimizer=optimizer)
batches = iter(run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS))
following = next(batches, None)
while following is not None:
    x, y = following
    following = next(batches, None)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
