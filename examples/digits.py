"""Learn to recognize handwritten digits."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils import data

import holdfast as hf


class Net(nn.Module):
    """Two convolutions and two linear layers, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classes = nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.features(x))


def digits() -> tuple[data.TensorDataset, data.TensorDataset]:
    """1797 images of 8 x 8 points that come with scikit-learn: one in five is kept for the test."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    kept = torch.arange(len(y)) % 5 == 0
    return data.TensorDataset(x[~kept], y[~kept]), data.TensorDataset(x[kept], y[kept])


def main() -> None:
    """Train, then say how many of the digits kept for the test are recognized."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    train, test = digits()
    run = hf.attach()
    model = run.replicate(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(train) // options.batch)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    for x, y in run.batches(train, global_batch=options.batch, num_epochs=options.epochs):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        right = (model(x).argmax(dim=1) == y).float().mean()
    print(f"{right:.1%} of {len(y)} digits recognized")


if __name__ == "__main__":
    main()
