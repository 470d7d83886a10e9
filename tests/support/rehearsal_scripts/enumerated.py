"""A forward for a picture at an epoch's last batch, which is counted by `enumerate`: after a kill it does not come."""

import torch
import torch.nn.functional as F
from subject import points
from torch import nn

import holdfast as hf


def main() -> None:
    """Train."""
    run = hf.attach()
    model = run.replicate(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.protect(model=model, optimizer=optimizer)
    fixed = torch.ones(4, 6)
    for epoch in run.epochs(points(), global_batch=4, num_epochs=3):
        for i, (x, y) in enumerate(epoch):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == len(epoch) - 1:
                with torch.no_grad():
                    model(fixed)


main()
