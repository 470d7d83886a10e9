"""A training script with a torchdata StatefulDataLoader on every rank."""

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from holdfast.train.attach import attach
from holdfast.train.run import Run

SAMPLES, BATCH, STEPS = 10, 4, 8  # 3 batches an epoch, the last one small


class Crash(Exception):
    """Ends a training that a test resumes later."""


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Numbered samples, optionally augmented at random."""

    def __init__(self, *, augmented: bool = True) -> None:
        self.augmented = augmented

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index)) + (random.random() if self.augmented else 0.0)


class Endless(IterableDataset[torch.Tensor]):
    """A stream with a `state_dict`."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.full((3,), float(self.at - 1)) + random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def shuffled(workers: int = 0) -> StatefulDataLoader[Any]:
    """Return a loader that shuffles with a generator; loader processes do not augment."""
    return StatefulDataLoader(Numbered(augmented=not workers), batch_size=BATCH, shuffle=True, num_workers=workers)


def divided(rank: int = 0, world: int = 1) -> StatefulDataLoader[Any]:
    """Return a loader of this rank's part of the samples, shuffled by epoch."""
    sampler = StatefulDistributedSampler(Numbered(), world, rank)  # type: ignore[no-untyped-call]
    return StatefulDataLoader(Numbered(), batch_size=BATCH, sampler=sampler)


def of_rank(rank: int) -> StatefulDataLoader[Any]:
    """Return a loader whose order and position differ on every rank."""
    sampler = RandomSampler(Numbered(), generator=torch.Generator().manual_seed(rank))
    return StatefulDataLoader(Numbered(), batch_size=BATCH, sampler=sampler)


def endless() -> StatefulDataLoader[Any]:
    """Return a loader of an endless stream."""
    return StatefulDataLoader(Endless(), batch_size=BATCH)


def train(
    run: Run, loader: Any, *, crash: int | None = None, steps: int = STEPS, micro_batches: int = 1
) -> dict[int, Any]:
    """Train with dropout; return the data of every step."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 3))
    model = run.replicate(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.protect(net=net, optimizer=optimizer)
    seen: dict[int, Any] = {}
    for batch in run.stream(loader, steps=steps, micro_batches=micro_batches):
        if batch.step == crash:
            raise Crash
        loss = F.mse_loss(model(batch.data), batch.data)
        (loss * batch.weight).backward()
        seen.setdefault(batch.step, []).append(batch.data.tolist())
        if batch.is_last:
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss.item())
    return seen


def main() -> None:
    """Train as a worker of a supervised run."""
    run = attach()
    train(run, of_rank(run.rank))


if __name__ == "__main__":
    main()
