"""Noise from a generator of the script's own, which nobody keys and nobody saves."""

import numpy as np
import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf


def main() -> None:
    """Train."""
    run = hf.attach()
    model = run.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.protect(model=model, optimizer=optimizer)
    noise = np.random.default_rng(7)
    for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
        x = x + 0.1 * torch.from_numpy(noise.standard_normal(x.shape)).float()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
