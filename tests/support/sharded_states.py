"""Saves and restores the states of sharded models on one to four ranks, and writes down whether the bits are the same.

Run as a script with a folder. It forks all ranks, so that torch is imported once:

1. For each number of ranks, train every case for a few steps, and save its state as a snapshot: each rank its part.
2. For each number of ranks, build every case anew, restore each of the snapshots, and compare the whole state.
"""

import copy
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP imports it, which takes seconds: here once for all ranks
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.payload import flatten, unflatten
from holdfast.checkpoint.reader import SnapshotReader
from holdfast.checkpoint.store import DirectoryStore
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import read_parts

STEP = 3
WORLD_SIZES = (1, 2, 3, 4)
# One operation for all parameters, because DTensor decides anew in each process how each operation is sharded. Other
# optimizers have cases of their own.
FUSED = partial(torch.optim.AdamW, fused=True)


@dataclass(eq=False)
class Case:
    """Protected objects, and a function that trains them for a step."""

    things: dict[str, Any]
    train: Callable[[torch.Tensor], None]
    replicated: list[nn.Module] = field(default_factory=list)
    tensor_parallel: int = 1  # the number of ranks in a group that trains the same samples


def mesh_of(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def case(model: nn.Module, world_size: int, kind: Any = FUSED, mesh: DeviceMesh | None = None, **options: Any) -> Case:
    """A model whose layers are each sharded, with an optimizer of `kind`."""
    shard_options = {
        name: options.pop(name) for name in ("shard_placement_fn", "offload_policy", "mp_policy") if name in options
    }
    mesh = mesh or mesh_of(world_size)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **shard_options)
    fully_shard(model, mesh=mesh, **shard_options)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **{"lr": 0.01, **options})
    return Case({"model": model, "optimizer": optimizer}, trainer(model, optimizer))


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def even(world_size: int) -> Case:
    return case(layers(6, 12, 24, 12), world_size, torch.optim.AdamW)


def uneven_rows(world_size: int) -> Case:
    return case(layers(6, 5, 7, 9), world_size)


def fewer_rows_than_ranks(world_size: int) -> Case:
    return case(layers(6, 3, 2, 1), world_size)


def mixed_precision(world_size: int) -> Case:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return case(layers(6, 5, 7), world_size, mp_policy=policy)


def bfloat16(world_size: int) -> Case:
    return case(layers(6, 5, 7).bfloat16(), world_size, foreach=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))  # type: ignore[no-any-return]


def tied_parameters(world_size: int) -> Case:
    model = Tied()
    fully_shard(model, mesh=mesh_of(world_size))
    optimizer = FUSED(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, trainer(model, optimizer))


def frozen_parameters(world_size: int) -> Case:
    model = layers(6, 5, 7, 3)
    model[1].requires_grad_(False)
    return case(model, world_size)


def buffers(world_size: int) -> Case:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model.register_buffer("seen", torch.arange(7))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return case(model, world_size)


def columns(world_size: int) -> Case:
    """Weights are sharded by columns, which FSDP supports if they can be divided evenly."""
    return case(layers(12, 12, 24, 12), world_size, shard_placement_fn=lambda p: Shard(p.ndim - 1))


def hybrid(world_size: int) -> Case:
    replicas = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    return case(layers(6, 5, 7, 9), world_size, mesh=mesh)


def replicas_only(world_size: int) -> Case:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    return case(layers(6, 5, 7, 9), world_size, mesh=mesh)


def offloaded(world_size: int) -> Case:
    return case(layers(6, 5, 7), world_size, offload_policy=CPUOffloadPolicy(pin_memory=False))


def two_models(world_size: int) -> Case:
    one, other = case(layers(6, 5, 7), world_size), case(layers(6, 9, 2), world_size, torch.optim.SGD, momentum=0.9)

    def train(x: torch.Tensor) -> None:
        one.train(x)
        other.train(x)

    things = {"g": one.things["model"], "d": other.things["model"]}
    return Case({**things, "og": one.things["optimizer"], "od": other.things["optimizer"]}, train)


def averaged(world_size: int) -> Case:
    model = layers(6, 5, 7)
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for layer in average.module:
        fully_shard(layer, mesh=mesh_of(world_size))
    made = case(model, world_size)

    def train(x: torch.Tensor) -> None:
        made.train(x)
        average.update_parameters(model)

    return Case({**made.things, "average": average}, train)


class OwnAverage:
    """A class of a user, with distributed tensors in its state."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def own_average(world_size: int) -> Case:
    made = case(layers(6, 5, 7), world_size)
    average = OwnAverage(made.things["model"])

    def train(x: torch.Tensor) -> None:
        made.train(x)
        average.update(made.things["model"])

    return Case({**made.things, "average": average}, train)


def tensor_parallel(world_size: int) -> Case:
    """FSDP over tensor parallelism: rows are divided twice (the first layer), or rows and columns (the second)."""
    if world_size % 2:
        return case(layers(8, 16, 8), world_size)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = layers(8, 16, 8)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return case(model, world_size, mesh=mesh["dp"], foreach=False)


def partly_tensor_parallel(world_size: int) -> Case:
    """The norm is sharded by FSDP alone, so all ranks of a tensor-parallel group have the same part of it."""
    size = 1 if world_size % 2 else 2
    mesh = init_device_mesh("cpu", (world_size // size, size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 6))
    if size > 1:
        parallelize_module(
            model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate()), "2": ColwiseParallel()}
        )
    made = case(model, world_size, mesh=mesh["dp"], foreach=False)
    return Case(made.things, made.train, tensor_parallel=size)


def unsharded(world_size: int) -> Case:
    """A model that every rank has as a whole, as under DDP. All ranks train the same samples here."""
    model = layers(6, 5, 7, 2)
    optimizer = FUSED(model.parameters())
    return Case({"model": model, "optimizer": optimizer}, trainer(model, optimizer), [model])


def partly_sharded(world_size: int) -> Case:
    """Only one layer is sharded. Gradients of the other are not averaged: all ranks train the same samples here."""
    model = layers(6, 5, 7, 2)
    fully_shard(model[1], mesh=mesh_of(world_size))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return Case({"model": model, "optimizer": optimizer}, trainer(model, optimizer), [model])


def with_optimizer(kind: Any, **options: Any) -> Callable[[int], Case]:
    return lambda world_size: case(layers(6, 5, 7, 2), world_size, kind, **options)


OPTIMIZERS: dict[str, Callable[[int], Case]] = {
    "foreach_adamw": with_optimizer(torch.optim.AdamW, foreach=True),
    "fused_adamw": with_optimizer(torch.optim.AdamW, fused=True),
    "amsgrad": with_optimizer(torch.optim.Adam, amsgrad=True, foreach=False),
    "sgd": with_optimizer(torch.optim.SGD),
    "sgd_momentum": with_optimizer(torch.optim.SGD, momentum=0.9, nesterov=True),
    "learning_rate_tensor": with_optimizer(torch.optim.AdamW, lr=torch.tensor(0.01), foreach=False),
    "adagrad": with_optimizer(torch.optim.Adagrad),
}
CASES: dict[str, Callable[[int], Case]] = {
    **{
        made.__name__: made
        for made in (
            *(even, uneven_rows, fewer_rows_than_ranks, mixed_precision, bfloat16, tied_parameters, frozen_parameters),
            *(buffers, columns, hybrid, replicas_only, offloaded, two_models, averaged, own_average, tensor_parallel),
            *(partly_tensor_parallel, unsharded, partly_sharded),
        )
    },
    **OPTIMIZERS,
}


SIZES = {
    "uneven_rows": WORLD_SIZES,
    "hybrid": (1, 2, 4),
    "tensor_parallel": (1, 2, 4),
    "fewer_rows_than_ranks": (1, 4),
    "partly_tensor_parallel": (1, 4),
    "unsharded": (1, 4),
    **dict.fromkeys(OPTIMIZERS, (2,)),
}


def world_sizes(name: str) -> tuple[int, ...]:
    """Return the numbers of ranks on which a case is saved and restored."""
    is_thorough = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
    return WORLD_SIZES if is_thorough else SIZES.get(name, (1, 3))


# The ranks.


def built(name: str, world_size: int, seed: int) -> Case:
    torch.manual_seed(seed)
    return CASES[name](world_size)


def train(case: Case, steps: range) -> None:
    dtype, width = next(
        (p.dtype, 6 if p.shape[1] == 6 else p.shape[1]) for p in next(iter(case.things.values())).parameters()
    )
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        case.train(torch.randn(8, width, generator=generator).to(dtype))


def whole(protected: Protected) -> dict[str, torch.Tensor]:
    """Return all tensors of the state, gathered from all ranks, and the rest of the state as a tensor of its JSON."""
    flat = flatten(protected.capture())
    tensors = {
        name: (value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)).detach().clone()
        for name, value in flat.tensors.items()
    }
    text = json.dumps(flat.extra, sort_keys=True).encode()
    return {**tensors, "(the rest)": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in sorted({*one, *other})
        if name not in one or name not in other or not _same(one[name], other[name])
    ]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def save(folder: Path, name: str, rank: int, world_size: int) -> None:
    """Train a case, save it, and write down its whole state now and after two more steps."""
    case = built(name, world_size, seed=1)
    protected = Protected(case.things)
    train(case, range(STEP))
    state = protected.divide(case.replicated, rank, world_size, case.tensor_parallel)
    store = DirectoryStore(folder / name / f"{world_size}")
    parts = payload.encode(state.parts, digests=True)
    digest = snapshot.write_shard(store, STEP, parts, rank=rank, count=world_size)
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, (digest.length, digest.xxh3))
    now = whole(protected)
    train(case, range(STEP, STEP + 2))
    later = whole(protected)
    if rank == 0:
        draft = snapshot.draft(STEP, state.flat.extra, state.layout, world=world_size)
        snapshot.commit(store, draft, [Digest(*each) for each in digests])
        torch.save([now, later], folder / name / f"{world_size}.pt")


class Restored:
    """A case that was built anew, into which snapshots are restored."""

    def __init__(self, folder: Path, name: str, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder / name, rank, world_size
        self._case = built(name, world_size, seed=2)
        self._protected = Protected(self._case.things)

    def restore(self, before: int) -> None:
        """Restore what `before` ranks saved; raise AssertionError if it is not what they had.

        The optimizers have no states at first, as in a new process, and then those of the snapshot before."""
        now, later = torch.load(self._folder / f"{before}.pt")
        self._load(before)
        assert differences(whole(self._protected), now) == []
        if before == self._world_size:
            train(self._case, range(STEP, STEP + 2))
            assert differences(whole(self._protected), later) == []
            self._load(before)  # over the states that were trained
            assert differences(whole(self._protected), now) == []
            for optimizer in self._protected.optimizers:
                optimizer.state.clear()

    def _load(self, before: int) -> None:
        protected = self._protected
        reader = SnapshotReader(DirectoryStore(self._folder / f"{before}"), STEP)
        held = flatten(protected.capture()).tensors if protected.is_sharded else {}
        state = unflatten(read_parts(reader, held, protected.parameter_of, self._rank), reader.extra)
        assert protected.differences(state) == []
        protected.restore(state)


def attempt(folder: Path, what: str, rank: int, work: Callable[[], None]) -> bool:
    try:
        work()
    except Exception:
        (folder / f"failed-{what}-{rank}").write_text(traceback.format_exc())
    else:
        (folder / f"done-{what}-{rank}").touch()
    failed = torch.tensor([float((folder / f"failed-{what}-{rank}").exists())])
    dist.all_reduce(failed)
    return not failed.item()


def run_rank(folder: Path, phase: str, rank: int, world_size: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{phase}-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for name in names:
        if phase == "save":
            attempt(folder, f"{name}-{world_size}", rank, lambda name=name: save(folder, name, rank, world_size))
            continue
        restored = Restored(folder, name, rank, world_size)
        for before in world_sizes(name):
            work = lambda restored=restored, before=before: restored.restore(before)  # noqa: E731
            attempt(folder, f"{name}-{before}-{world_size}", rank, work)
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    for phase in ("save", "restore"):
        for world_size in WORLD_SIZES:
            children, own = [], [name for name in names if world_size in world_sizes(name)]
            for rank in range(world_size):
                if not (child := os.fork()):
                    run_rank(folder, phase, rank, world_size, own)
                    os._exit(0)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
