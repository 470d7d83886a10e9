"""The job of the benchmark: trains a residual network with LayerNorm, replicated or sharded, and notes its step times."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import holdfast as hf

FEATURES, CLASSES, SAMPLES = 32, 8, 65536


class Samples(TensorDataset):
    """Samples that are sliced from tensors a batch at once."""

    def __getitems__(self, ids: list[int]) -> tuple[torch.Tensor, ...]:
        return self[ids]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--times", type=Path)
    task = parser.parse_args()
    run = hf.attach(seed=3)
    device = run.device if task.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    blocks = [Block(task.width) for _ in range(task.layers)]
    net = nn.Sequential(nn.Linear(FEATURES, task.width), *blocks, nn.Linear(task.width, CLASSES)).to(device)
    if task.kind == "fsdp":
        for block in blocks[1:]:  # the first belongs to the layers around it
            fully_shard(block, mesh=run.mesh)
        model = fully_shard(net, mesh=run.mesh)
    else:
        model = run.replicate(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run.protect(model=model, optimizer=optimizer)
    draw = torch.Generator().manual_seed(1)
    data = Samples(torch.randn(SAMPLES, FEATURES, generator=draw), torch.randint(CLASSES, (SAMPLES,), generator=draw))
    times: list[float] = []
    before = time.perf_counter()
    for x, y in run.batches(data, global_batch=task.batch, steps=task.steps, collate_fn=tuple):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss.item())
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    if task.times and run.is_main:
        count = sum(value.numel() for value in net.parameters())
        task.times.write_text(json.dumps({"seconds": times, "parameters": count}))


if __name__ == "__main__":
    main()
