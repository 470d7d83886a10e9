"""Learn a plane, in the shape of PyTorch's tutorial on torchrun: a class that trains, and goes on after a failure."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import holdfast as hf

run = hf.attach()


def points(count: int) -> data.TensorDataset:
    """Points, and what a plane has there."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.rand(count, 20, generator=drawn)
    return data.TensorDataset(x, x @ torch.rand(20, 1, generator=drawn))


class Trainer:
    """Trains a model, epoch by epoch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, train: data.Dataset, batch: int) -> None:
        self.optimizer, self.data, self.batch = optimizer, train, batch
        self.model = run.replicate(model)
        run.protect(model=self.model, optimizer=self.optimizer)

    def _run_batch(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, loader) -> None:
        losses = [self._run_batch(x, y) for x, y in loader]
        print(f"{len(losses)} batches: mean squared error {sum(losses) / len(losses):.5f}")

    def train(self, epochs: int) -> None:
        """Train for so many epochs."""
        for loader in run.epochs(self.data, global_batch=self.batch, num_epochs=epochs):
            self._run_epoch(loader)


def main() -> None:
    """Train, whatever was trained before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, points(2048), options.batch)
    trainer.train(options.epochs)


if __name__ == "__main__":
    main()
