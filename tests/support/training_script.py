"""A training script whose task is its argument, as JSON."""

import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.distributed.ranks import JOINS
from holdfast.train.attach import attach
from holdfast.train.run import Run

SAMPLES, WIDTH, CLASSES = 96, 20, 5
SECONDS = 2.5  # of trouble: longer than the 1.5 s after which a worker that blocks the others is killed


@dataclass(frozen=True, kw_only=True)
class Task:
    """The model to train, the schedule, and the trouble that ranks get into."""

    model: str = "small"
    dropout: float = 0.1
    batch: int = 16
    epochs: int = 10
    micro_batches: int = 1
    num_workers: int = 0
    augment: bool = True
    scaler: bool = False  # uses a gradient scaler, in float32 because not every CPU has a smaller type
    averaged: bool = False  # protects a moving average of the weights
    unseeded: bool = False
    pause: float = 0.0
    until: str = ""  # a file; once it exists, steps no longer pause
    patience: float = 0.0  # seconds per step while ranks are missing, so that replacements arrive before the last step
    bucket: float = 0.0  # DDP's bucket size in megabytes; 0 for its default
    gate: str = ""  # a file that must exist before the last step ends
    trouble: str = ""  # what the ranks in `troubled` do before step 12: deadlock, compute or sleep
    troubled: tuple[int, ...] = ()
    eager: bool = False  # the optimizer steps after every micro-batch
    replicated: bool = True
    steps_every: int = 1  # steps whose gradients are accumulated by hand
    leaves_after: int = 0  # steps after which the script stops the run


class Backwards(nn.Module):
    """Layers registered in another order than they are used, so that DDP rebuilds its buckets."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(700, CLASSES), nn.Linear(WIDTH, 800), nn.Linear(800, 700)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(F.relu(self.middle(F.relu(self.first(x))))))


class Tied(nn.Module):
    """Two layers that share a weight, whose gradient is complete only after the second."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.middle, self.again = nn.Linear(WIDTH, 800), nn.Linear(800, 800), nn.Linear(800, 800)
        self.again.weight = self.middle.weight
        self.last, self.dropout = nn.Linear(800, CLASSES), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(F.relu(self.again(F.relu(self.middle(F.relu(self.first(x))))))))


def network(task: Task) -> nn.Module:
    """Build the model of a task.

    `wide`, `tied` and `backwards` are large enough for the order of a sum over ranks to matter; `normed` has buffers.
    """
    if task.model in ("backwards", "tied"):
        return {"backwards": Backwards, "tied": Tied}[task.model](task.dropout)
    widths = (800, 700) if task.model == "wide" else (30, 20)
    layers: list[nn.Module] = [
        nn.Linear(WIDTH, widths[0]),
        nn.ReLU(),
        nn.Dropout(task.dropout),
        nn.Linear(*widths),
        nn.ReLU(),
    ]
    if task.model == "normed":
        layers.append(nn.BatchNorm1d(widths[1]))
    return nn.Sequential(*layers, nn.Linear(widths[1], CLASSES))


class Points:
    """Labeled points, augmented with random numbers of every generator if asked."""

    def __init__(self, augment: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self._y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self._augment = augment

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        push = random.random() + float(np.random.random()) + float(torch.rand(())) if self._augment else 0.0
        return self._x[index] + 0.01 * push, self._y[index]


class Crash(Exception):
    """Ends a training that a test resumes later."""


def train(run: Run, task: Task, steps: int | None = None) -> nn.Module:
    """Train to the end, or raise `Crash` after a given number of steps."""
    if task.unseeded:
        torch.seed()
    net = network(task).to(run.device)
    options = {"bucket_cap_mb": task.bucket} if task.bucket else {}
    model = run.replicate(net, **options) if task.replicated else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 20, 40], gamma=0.5)
    scaler = torch.amp.GradScaler(run.device.type, enabled=task.scaler, growth_interval=7)
    averages = {"average": AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))} if task.averaged else {}
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, **averages)
    how: dict[str, Any] = {"micro_batches": task.micro_batches, "num_workers": task.num_workers}
    with suppress(Crash):
        for batch in run.batches(Points(task.augment), global_batch=task.batch, num_epochs=task.epochs, **how):
            if batch.step == steps:
                raise Crash
            if batch.step == 12 and run.rank in task.troubled:
                struggle(task.trouble)
            linger(run, task, batch.step + 1 == task.epochs * (SAMPLES // task.batch))
            x, y = batch.to(run.device)
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * batch.weight).backward()
            run.log(loss=loss.item())
            if task.eager or (batch.is_last and (batch.step + 1) % task.steps_every == 0):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                for average in averages.values():
                    average.update_parameters(net)
            if batch.step + 1 == task.leaves_after:
                run.stop()
    return net


def linger(run: Run, task: Task, last: bool) -> None:
    """Sleep as long as the task asks for in each step."""
    paused = not (task.until and Path(task.until).exists())
    time.sleep(task.pause * paused + (task.patience if run.world_size < int(os.environ.get("WORLD_SIZE", 1)) else 0.0))
    deadline = time.monotonic() + 120
    while last and task.gate and not Path(task.gate).exists():
        assert time.monotonic() < deadline, f"{task.gate} never came"
        time.sleep(0.01)


def struggle(how: str) -> None:
    """Hang or be slow, unless this process replaces a lost rank."""
    if JOINS in os.environ:
        return
    if how == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif how == "sleep":
        time.sleep(SECONDS)
    until = time.monotonic() + SECONDS
    while how == "compute" and time.monotonic() < until:
        torch.ones(100, 100) @ torch.ones(100, 100)


if __name__ == "__main__":
    train(attach(*sys.argv[2:], save_every=5), Task(**json.loads(sys.argv[1])))
