"""A small job with samples drawn at random, for tests of epochs and of how a run ends."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from attached_runs import attach
from holdfast.train.run import Run

SAMPLES, BATCH, EPOCHS = 14, 4, 3  # 3 windows an epoch, two samples wait for the next shuffle
WINDOWS = SAMPLES // BATCH


class Pushed:
    """Samples that are pushed about at random."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(6.0) * index / SAMPLES + torch.rand(6)


def protected(*where: Path, **how: Any) -> tuple[Run, nn.Module, torch.optim.Optimizer]:
    run, net = attach(*where, **how), nn.Linear(6, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run.protect(net=net, optimizer=optimizer)
    return run, net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    net(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
