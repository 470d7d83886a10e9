"""Trains a small network sharded with FSDP2, or HSDP, as the task in the first argument says."""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import holdfast as hf

WIDTH = 9  # is not divisible by the number of ranks, and less than two rows per rank


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.gelu(self.inner(self.norm(x))))


def sharded_network(mesh: DeviceMesh, dropout: float = 0.1, *, batch_norm: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(dropout), nn.Linear(WIDTH, 2))  # 2 rows: some ranks have none
    if batch_norm:
        model.insert(1, nn.BatchNorm1d(WIDTH))  # each rank has its own statistics
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(task: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = hf.attach(seed=3)
    mesh = run.device_mesh(replicas=task.get("replicas", 1))
    model = sharded_network(mesh, task.get("dropout", 0.1), batch_norm=task.get("batch_norm", False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    average = None
    if task.get("averaged"):
        average = sharded_network(mesh, task.get("dropout", 0.1), batch_norm=task.get("batch_norm", False))
        average.load_state_dict(model.state_dict())
    seen = {"samples": 0}  # by this rank
    things = {} if average is None else {"average": average, "seen": seen}
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, **things)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 5, generator=draw), torch.randint(2, (96,), generator=draw))
    micro_batches = task.get("micro_batches", 1)
    for batch in run.batches(
        data, global_batch=task.get("batch", 12), num_epochs=task.get("epochs", 2), micro_batches=micro_batches
    ):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        (loss * batch.weight).backward()
        if not batch.is_last:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        seen["samples"] += len(x)
        if average is not None:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
