"""A dataset that draws from a generator of its own, seeded anew in every process."""

import random

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, SAMPLES, network, points

import holdfast as hf


class Shaken:
    """Points, pushed about."""

    def __init__(self) -> None:
        self.points = points()
        self.push = random.Random()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.points[index]
        return x + self.push.random(), y


run = hf.attach()
model = run.replicate(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(Shaken(), global_batch=BATCH, num_epochs=EPOCHS):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
