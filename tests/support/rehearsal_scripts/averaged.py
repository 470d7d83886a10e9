"""Averages that are not protected and have no effect on training: of the weights, or only of the data."""

import sys

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points
from torch.optim.swa_utils import AveragedModel

import holdfast as hf


def main() -> None:
    """Train."""
    run = hf.attach()
    model = run.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = AveragedModel(run.unwrap(model)) if "weights" in sys.argv else None
    centre = torch.zeros(6)
    run.protect(model=model, optimizer=optimizer)
    for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update_parameters(run.unwrap(model))
        centre = 0.9 * centre + 0.1 * x.mean(0)


main()
