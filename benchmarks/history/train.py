"""Train a small network on random samples for as many steps as the first argument says, and log every loss."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast as hf

SAMPLES, FEATURES, BATCH = 4096, 16, 32


def main() -> None:
    """Train on samples that are the same in every attempt."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES)
    y = (x[:, :2].sum(dim=1) > 0).long()
    run = hf.attach()
    model = run.replicate(nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.protect(model=model, optimizer=optimizer)
    for features, labels in run.batches(TensorDataset(x, y), global_batch=BATCH, steps=int(sys.argv[1])):
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)


if __name__ == "__main__":
    main()
