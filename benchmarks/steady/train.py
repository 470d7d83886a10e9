"""The script of every worker: train one case with plain DDP and with the protected loop, alternating by block.

Arguments: the device, `replicated` (DDP) or `sharded` (FSDP2), the case, the number of repeats, the steps in a block (0:
the default of the case), and the file for the times of rank 0.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from models import CASES, Case, megabytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, DistributedSampler

from holdfast.live.sharded.mesh_group import MeshGroup
from holdfast.train.attach import attach
from holdfast.train.observe.unprotected_state import UnprotectedStateCheck
from holdfast.train.run import Run

SHARDED = "sharded"
PROTECTED = "protected"
ARMS = ("plain", PROTECTED, "plain again")
WARM = 3  # blocks of warm-up: DDP rebuilds its buckets after its first step, and the first save happens
BACKWARD = torch.autograd.backward
Advance = Callable[[int], None]


class Numbered:
    """A dataset whose samples are their indices: `Samples.take` then slices a whole batch from the tensors at once."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, ids: list[int]) -> list[int]:
        return ids


class Samples:
    """All samples, on the training device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.x, self.y = (tensor.to(device) for tensor in case.samples())

    def take(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return the batch of the samples `ids`."""
        index = torch.tensor(ids, device=self.x.device)
        return self.x[index], self.y[index]


def plain(run: Run, case: Case, samples: Samples, how: str) -> Advance:
    """Return a loop as written without holdfast: DDP or FSDP2, a DistributedSampler and a DataLoader.

    It has its own process group, as a run with live recovery has. If both plain arms shared one, its connections would
    be used twice as often and be idle half as long between two blocks. Call this before `protected`: once `run.mesh`
    exists, every new group of a sharded run with live recovery is holdfast's.
    """
    if how == SHARDED:
        group = dist.new_group()
        assert not isinstance(group, MeshGroup), "a plain arm must use torch's own process group"
        mesh = DeviceMesh.from_group(group, run.device.type)
        model, optimizer = made(case, run.device, mesh)
    else:
        model, optimizer = made(case, run.device)
        model = DistributedDataParallel(model, process_group=dist.new_group())
    numbers = Numbered(len(samples.x))
    sampler: DistributedSampler[int] = DistributedSampler(numbers, drop_last=True)  # type: ignore[arg-type]
    loader = DataLoader(numbers, case.share, sampler=sampler, collate_fn=samples.take, drop_last=True)  # type: ignore[arg-type]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from loader

    return without_ours(advance(case, model, optimizer, batches()))


def without_ours(go: Advance) -> Advance:
    """Wrap `go` to run with torch as it was before `attach`: no guard around backward, no hook after an optimizer step."""

    def go_unguarded(steps: int) -> None:
        guarded, hooks = torch.autograd.backward, dict(_global_optimizer_post_hooks)
        torch.autograd.backward = BACKWARD
        _global_optimizer_post_hooks.clear()
        try:
            go(steps)
        finally:
            torch.autograd.backward = guarded
            _global_optimizer_post_hooks.update(hooks)

    return go_unguarded


def protected(run: Run, case: Case, samples: Samples, how: str) -> Advance:
    """Return the same loop with holdfast: protected and recorded, with no save during the measurement."""
    model, optimizer = made(case, run.device, run.mesh if how == SHARDED else None)
    if how != SHARDED:
        model = run.replicate(model)
    run.protect(model=model, optimizer=optimizer)
    batches = run.batches(
        Numbered(len(samples.x)), global_batch=case.share * run.world_size, num_epochs=1 << 20, collate_fn=samples.take
    )
    return advance(case, model, optimizer, (batch.data for batch in batches))


def made(case: Case, device: torch.device, mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model with the same initial weights for every arm, sharded over `mesh` if given, and its optimizer."""
    torch.manual_seed(0)
    model = case.build().to(device)
    if mesh is not None:
        lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
        for block in lists[0] if lists else model.children():
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if device.type == "cuda":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def advance(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]]
) -> Advance:
    """Return a function that trains `steps` steps on `batches`, in the same way for every arm."""

    def go(steps: int) -> None:
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            case.loss(model, x, y).backward()
            optimizer.step()

    return go


def block(arm: Advance, case: Case, device: torch.device) -> tuple[float, float]:
    """Time one block, from a common start of all ranks until the last rank and its device have finished.

    Return the wall clock seconds, and the processor seconds of all ranks, which say more on a machine with other load.
    """
    met(device)
    began, used = time.perf_counter(), time.process_time()
    arm(case.steps)
    met(device)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    together = torch.tensor(used, dtype=torch.float64, device=device)
    dist.all_reduce(together)
    return seconds, float(together)


def met(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(arms: dict[str, Advance], case: Case, repeats: int, device: torch.device) -> list[dict[str, list[float]]]:
    """Return both kinds of seconds per step of every arm, one entry per repeat; the order of the arms keeps changing."""
    order = list(arms)
    times: list[dict[str, list[float]]] = []
    for repeat in range(-1, repeats):
        blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(WARM if repeat < 0 else case.blocks):
            for name in order:
                blocks[name].append(block(arms[name], case, device))
            order.reverse()
        order = order[1:] + order[:1]
        steps = case.steps * case.blocks
        times.append({name: [sum(kind) / steps for kind in zip(*pairs, strict=True)] for name, pairs in blocks.items()})
    return times[1:]


def main(device: str, how: str, name: str, repeats: str, steps: str, result: str) -> None:
    """Measure one case; rank 0 writes its times to the file `result`."""
    torch.set_num_threads(1)
    UnprotectedStateCheck.look = lambda *_: None  # type: ignore[method-assign]  # it would find the plain arms' models
    run = attach()
    case = CASES[device][name]
    case = replace(case, steps=int(steps) or case.steps)
    samples = Samples(case, run.device)
    loops = {arm: plain(run, case, samples, how) for arm in ARMS if arm != PROTECTED}
    loops[PROTECTED] = protected(run, case, samples, how)
    arms = {arm: loops[arm] for arm in ARMS}
    times = measure(arms, case, int(repeats), run.device)
    if run.rank == 0:
        Path(result).write_text(json.dumps({"times": times, "megabytes": megabytes(case.build())}))
    dist.barrier()  # a rank that exits in the middle of its loop counts as failed and ends the other ranks, so wait for all first


if __name__ == "__main__":
    main(*sys.argv[1:])
