"""The training script that strikes.py runs: a small network, `plain` or `normed` (BatchNorm, dropout and AdamW).

Run: holdfast run struck.py -- MODEL EPOCHS CONTROL. Steps are slowed down until the folder CONTROL has a file `hurry`,
so that strikes hit a run that is still training.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast as hf

SAMPLES, BATCH, WIDTH, CLASSES = 4096, 64, 32, 4
PAUSE = 0.003


def network(model: str) -> nn.Module:
    """Return three layers, which `bucket_cap_mb` below divides into more than one bucket."""
    between = [nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)] if model == "normed" else [nn.ReLU()]
    return nn.Sequential(nn.Linear(WIDTH, 256), *between, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def main(model: str, epochs: str, control: str) -> None:
    """Train; all random numbers of the network come from the seed of the run."""
    torch.set_num_threads(1)
    run = hf.attach()
    net = run.replicate(network(model), bucket_cap_mb=0.1)
    if model == "normed":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.005)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    run.protect(model=net, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    hurry = Path(control) / "hurry"
    for batch in run.batches(TensorDataset(x, y), global_batch=BATCH, num_epochs=int(epochs)):
        if not hurry.exists():
            time.sleep(PAUSE)
        optimizer.zero_grad()
        x, y = batch
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss=loss.item())


if __name__ == "__main__":
    main(*sys.argv[1:])
