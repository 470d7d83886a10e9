"""A loop on Lightning's Fabric teaches a small network to tell which of two spirals a point is on."""

import argparse
import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

from holdfast.trainers.fabric import attach


def spirals(points: int, seed: int) -> data.TensorDataset:
    """Points on two spirals, with a little noise."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(points) % 2
    turn = 3 * math.pi * torch.rand(points, generator=draw)
    angle = turn + math.pi * y
    x = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 5
    return data.TensorDataset(x + 0.05 * torch.randn(points, 2, generator=draw), y)


def main() -> None:
    """Train, then say how many of the points kept for the test are told right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=1024)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()

    train, test = spirals(options.points, 1), spirals(256, 2)
    fabric = L.Fabric(devices=options.devices, strategy="ddp" if options.devices > 1 else "auto")
    run = attach(fabric)
    fabric.launch()
    L.seed_everything(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    run.protect(model=model, optimizer=optimizer)
    for x, y in run.batches(train, global_batch=options.batch, num_epochs=options.epochs):
        loss = F.cross_entropy(model(x.to(fabric.device)), y.to(fabric.device))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        right = (model(x.to(fabric.device)).argmax(dim=1).cpu() == y).float().mean()
    fabric.print(f"{right:.1%} of 256 points told right")


if __name__ == "__main__":
    main()
