"""Noise that depends on a count of the script's own, which a replacement of a lost worker does not have."""

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
    steps = 0
    for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
        F.cross_entropy(model(x * (1 + 0.1 * steps)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += len(y) // len(y)


main()
