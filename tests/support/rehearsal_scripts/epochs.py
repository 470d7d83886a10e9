"""Epochs with a validation that draws random numbers and a scheduler's step after each: exact, as run.epochs promises."""

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf

run = hf.attach()
model = run.replicate(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
for epoch in run.epochs(points(), global_batch=BATCH, num_epochs=EPOCHS):
    for x, y in epoch:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(4, 6))
    scheduler.step()
