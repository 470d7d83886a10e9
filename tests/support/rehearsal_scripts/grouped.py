"""Epochs by itertools.groupby, which asks for the next epoch's first batch before this epoch's work is done."""

from itertools import groupby

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf

run = hf.attach()
model = run.replicate(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
for _, epoch in groupby(run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS), key=lambda batch: batch.epoch):
    for x, y in epoch:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
