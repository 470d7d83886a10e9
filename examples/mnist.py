"""Learn to recognize digits in the shape of PyTorch's MNIST example: train, test and schedule by epoch."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import holdfast as hf


class Net(nn.Module):
    """A convolution and two linear layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten())
        self.classes = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.classes(self.features(x)), dim=1)


def digits(count: int) -> data.TensorDataset:
    """Images of 8 x 8 points, made up: ten patterns, and noise."""
    drawn = torch.Generator().manual_seed(0)
    patterns, labels = torch.rand(10, 1, 8, 8, generator=drawn), torch.randint(10, (count,), generator=drawn)
    return data.TensorDataset(patterns[labels] + torch.randn(count, 1, 8, 8, generator=drawn) / 3, labels)


def train(model: nn.Module, device: torch.device, loader, optimizer: torch.optim.Optimizer) -> None:
    """Train for one epoch."""
    model.train()
    for number, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if number % 10 == 0:
            print(f"{number} of {len(loader)} batches of {len(loader.dataset)} images: loss {loss.item():.4f}")


def test(model: nn.Module, device: torch.device, loader) -> None:
    """Say how many images that were not trained are recognized."""
    model.eval()
    loss = right = 0
    with torch.no_grad():
        for x, y in loader:
            output = model(x.to(device))
            loss += F.nll_loss(output, y.to(device), reduction="sum").item()
            right += (output.argmax(dim=1) == y.to(device)).sum().item()
    count = len(loader.dataset)
    print(f"loss {loss / count:.4f}, {right} of {count} digits recognized ({right / count:.0%})")


def main() -> None:
    """Train and test by turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    options = parser.parse_args()

    run = hf.attach()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known, unknown = data.random_split(digits(1800), [1400, 400], torch.Generator().manual_seed(1))
    tests = data.DataLoader(unknown, batch_size=256)
    model = run.replicate(Net().to(device))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=options.gamma)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    for batches in run.epochs(known, global_batch=options.batch, num_epochs=options.epochs):
        train(model, device, batches, optimizer)
        test(model, device, tests)
        scheduler.step()


if __name__ == "__main__":
    main()
