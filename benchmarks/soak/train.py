"""The training script of the soak: a small network, with faults that only a script can cause, on request.

Run: holdfast run train.py -- TASK, with the task as JSON. A file `deadlock-1` in the control folder requests a deadlock
of rank 1, which removes the file first.
"""

import errno
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

SAMPLES, WIDTH, CLASSES = 192, 20, 5


class Points:
    """Labelled points, shifted by random numbers of every generator."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        push = random.random() + float(np.random.random()) + float(torch.rand(()))
        return self._x[index] + 0.01 * push, self._y[index]


def network(model: str) -> nn.Module:
    """Return the network: `wide` is large enough to reveal the order of an all-reduce, `normed` has buffers and dropout."""
    widths = (700, 600) if model == "wide" else (40, 30)
    layers: list[nn.Module] = [nn.Linear(WIDTH, widths[0]), nn.ReLU()]
    if model == "normed":
        layers += [nn.BatchNorm1d(widths[0]), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(*widths), nn.ReLU(), nn.Linear(widths[1], CLASSES))


def obey(control: Path, rank: int) -> None:
    """Cause the fault that a file requests, once."""
    for order, act in ORDERS.items():
        file = control / f"{order}-{rank}"
        if file.exists():
            file.unlink()
            act()


def deadlock() -> None:
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def refuse() -> None:
    """Fail like a data set on a bad disk."""
    raise OSError(errno.EIO, os.strerror(errno.EIO), "shard-00017")


ORDERS = {"deadlock": deadlock, "exception": refuse}


def main() -> None:
    """Train the steps of the task; a step takes a few milliseconds."""
    task = json.loads(sys.argv[1])
    run = hf.attach()
    model = run.replicate(network(task["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 200, 300], gamma=0.5)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    batches = run.batches(
        Points(), global_batch=24, num_epochs=task["steps"] // (SAMPLES // 24), num_workers=task["loaders"]
    )
    for x, y in batches:
        obey(Path(task["control"]), run.rank)
        time.sleep(task["pause"])
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.log(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


if __name__ == "__main__":
    main()
