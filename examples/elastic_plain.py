"""Learn a plane, in the shape of PyTorch's tutorial on torchrun: a class that trains, and goes on after a failure."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data


def points(count: int) -> data.TensorDataset:
    """Points, and what a plane has there."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.rand(count, 20, generator=drawn)
    return data.TensorDataset(x, x @ torch.rand(20, 1, generator=drawn))


class Trainer:
    """Trains a model, epoch by epoch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, train: data.Dataset, batch: int) -> None:
        self.optimizer, self.data, self.batch = optimizer, train, batch
        self.epochs_run = 0
        self.snapshot = Path("snapshot.pt")
        self.model = model
        if self.snapshot.exists():
            self._load_snapshot()
        self.model = DistributedDataParallel(model)

    def _load_snapshot(self) -> None:
        snapshot = torch.load(self.snapshot, weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs"]

    def _save_snapshot(self, epoch: int) -> None:
        torch.save({"model": self.model.module.state_dict(), "epochs": epoch + 1}, self.snapshot)

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
        sampler = data.DistributedSampler(self.data, drop_last=True)
        share = self.batch // dist.get_world_size()
        loader = data.DataLoader(self.data, batch_size=share, sampler=sampler, drop_last=True)
        for epoch in range(self.epochs_run, epochs):
            sampler.set_epoch(epoch)
            self._run_epoch(loader)
            if dist.get_rank() == 0:
                self._save_snapshot(epoch)


def main() -> None:
    """Train, whatever was trained before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer, points(2048), options.batch)
    trainer.train(options.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
