"""Trains a small network in a loop on Lightning's Fabric, sharded with FSDP2, as the task in the first argument says."""

import json
import os
import sys
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from holdfast.trainers.fabric import attach

WORKERS = int(os.environ["WORLD_SIZE"])


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main(task: dict[str, Any]) -> None:
    strategy = ModelParallelStrategy(shard, data_parallel_size=WORKERS, tensor_parallel_size=1)
    fabric = L.Fabric(accelerator="cpu", devices=WORKERS, strategy=strategy)
    fabric.launch()  # before attach: the strategy then has a mesh over a group that the run replaces
    run = attach(fabric, seed=3)
    layers = [nn.Linear(5, 9), nn.Tanh(), nn.Dropout(task.get("dropout", 0.1)), nn.Linear(9, 9), nn.Linear(9, 2)]
    model = fabric.setup_module(nn.Sequential(*layers))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    run.protect(model=model, optimizer=optimizer)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 5, generator=draw), torch.randint(2, (64,), generator=draw))
    for x, y in run.batches(data, global_batch=16, num_epochs=2):
        fabric.backward(F.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
