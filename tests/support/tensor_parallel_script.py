"""Trains a small network with tensor parallelism and FSDP2, as the task in the first argument says."""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import holdfast as hf

WIDTH = 8


class Block(nn.Module):
    """The feed-forward layer of a transformer, with dropout of what its two linear layers return."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x))))))


def parallel_network(mesh: DeviceMesh, dropout: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(dropout), nn.Linear(WIDTH, 3))
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        parallelize_module(model[1], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data_parallel = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
    for layer in model:
        fully_shard(layer, mesh=data_parallel)
    fully_shard(model, mesh=data_parallel)
    return model


def mean_label(part: Any) -> float:
    return sum(int(y) for _, y in part) / len(part)


def main(task: dict[str, Any]) -> None:
    torch.manual_seed(0)
    run = hf.attach(seed=3)
    size = task.get("tensor_parallel", 2)  # or one for each attempt
    size = size[run.attempt - 1] if isinstance(size, list) else size
    mesh = run.device_mesh(tensor_parallel=size, replicas=task.get("replicas", 1))
    model = parallel_network(mesh, task.get("dropout", 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 5, generator=draw), torch.randint(3, (96,), generator=draw))
    for x, y in run.batches(data, global_batch=task.get("batch", 12), num_epochs=task.get("epochs", 2)):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        run.log(loss=run.mean(loss.item(), len(x)))
    if task.get("evaluates"):
        part = run.shard(data)
        run.print(f"evaluated {run.sum(len(part))} samples, mean label {run.mean(mean_label(part), len(part)):.6f}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
