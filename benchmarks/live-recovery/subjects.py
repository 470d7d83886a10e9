"""The models that bench.py trains, their samples, and the notes that every process writes about its steps.

`small` has steps of a few milliseconds, `state60` 60 MB of parameters and AdamW's moments, `gpt2` 124 M parameters. In
`gpt2-bf16` parameters and gradients are bf16, which halves the all-reduce.
"""

import copy
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).resolve().parent.parent / "steady"))

from models import GPT, mlp, points, texts

LENGTH = 256  # tokens in a sample of text


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, its samples, and the number of samples per rank and step."""

    build: Callable[[], nn.Module]
    samples: Callable[[], tuple[Tensor, Tensor]]
    share: int

    def made(self, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
        """Return the model and all samples, the same in every process."""
        torch.manual_seed(0)
        model = self.build().to(device)
        x, y = (tensor.to(device) for tensor in self.samples())
        return model, x, y


SUBJECTS = {
    "small": Subject(build=lambda: mlp([64, 256, 256, 10]), samples=lambda: points(64), share=16),
    "state60": Subject(build=lambda: mlp([768, *[1024] * 5, 10]), samples=lambda: points(768), share=8),
    "gpt2": Subject(build=GPT, samples=lambda: texts(LENGTH, 50304, 512), share=2),
    "gpt2-bf16": Subject(build=lambda: GPT().to(torch.bfloat16), samples=lambda: texts(LENGTH, 50304, 512), share=2),
}


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the layers of `model` over `mesh`, and then the whole model."""
    layers = [layer for child in model.children() for layer in (child if isinstance(child, nn.ModuleList) else [child])]
    tied = {id(value) for value in model.state_dict(keep_vars=True).values() if _uses(layers, value) > 1}
    for layer in layers:
        parameters = [*layer.parameters()]
        if parameters and not any(id(parameter) in tied for parameter in parameters):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _uses(layers: list[nn.Module], value: Tensor) -> int:
    return sum(any(value is parameter for parameter in layer.parameters()) for layer in layers)


class Numbered:
    """A dataset whose samples are their indices: a whole batch is then sliced from tensors at once."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, ids: list[int]) -> list[int]:
        return ids


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Train one step, and wait for the device to finish it."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    F.cross_entropy(logits.flatten(0, -2).float(), y.flatten()).backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()


def warm_up(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train a step of a copy of `model`, so that a worker that waits as a spare has loaded the kernels of its GPU."""
    copied = copy.deepcopy(model)
    train(copied, torch.optim.AdamW(copied.parameters(), fused=True), x, y)


class Notes:
    """The steps of this process with their times, in its own file; also deadlocks the process when a file asks for it."""

    def __init__(self, folder: Path) -> None:
        self._order = folder / "control" / f"deadlock-{os.getpid()}"
        self._file = (folder / "notes" / str(os.getpid())).open("ab", buffering=0)

    def trained(self, step: int, rank: int, world: int) -> None:
        """Note the end of a step."""
        self._file.write(f"{step} {rank} {world} {time.time()!r}\n".encode())

    def obey(self) -> None:
        """Deadlock, by waiting for a lock that this thread holds, if the file of this process exists."""
        if self._order.exists():
            self._order.with_suffix(".obeyed").write_text(repr(time.time()))
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
