"""A training script whose samples come in the order of a sampler, which is its argument."""

import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import holdfast as hf

SAMPLES, EPOCHS, BATCH = 60, 5, 12


def buckets(epoch: int, seed: int) -> Iterable[int]:
    """Return an order in which every five neighbours belong together, and easy ones come first in the first epoch."""
    generator = torch.Generator().manual_seed(seed + epoch)
    first = 5 * torch.arange(SAMPLES // 5) if epoch == 0 else 5 * torch.randperm(SAMPLES // 5, generator=generator)
    return (first[:, None] + torch.arange(5)).flatten()


def main(kind: str) -> None:
    """Train a small network with a sampler of this kind."""
    run = hf.attach(save_every=4)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 8, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    samplers = {
        "weighted": WeightedRandomSampler(torch.arange(SAMPLES).float(), 64, generator=torch.Generator()),
        "subset": SubsetRandomSampler(range(0, SAMPLES, 2)),
        "doubled": [2 * (index // 4) for index in range(SAMPLES)],
        "function": buckets,
    }
    model = run.replicate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.protect(model=model, optimizer=optimizer)
    data = TensorDataset(x, y)
    for batch in run.batches(data, sampler=samplers[kind], global_batch=BATCH, num_epochs=EPOCHS):
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        run.log(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
