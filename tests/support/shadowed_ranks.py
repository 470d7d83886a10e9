"""Trains sharded models on three ranks, each of which keeps a copy of another rank's shards, and compares the copies.

Run as a script with a folder. Rank 0 writes `results.json`: for each case, the ranks whose copy differs, and whether
gradients were sent.
"""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # they are public
from torch.distributed.fsdp import FSDPModule
from torch.optim import ASGD, SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from holdfast.distributed.gloo_link import Link
from holdfast.live.sharded import shadow
from holdfast.live.sharded.collectives import Collectives
from holdfast.live.sharded.mesh_group import ModuleGather, replace_default_group_by_mesh
from holdfast.live.sharded.operations import Ring
from holdfast.live.sharded.shadow import MOMENTS, PARAMETERS, OwnShards, exchange_copies
from holdfast.train.state.protected import Protected
from sharded_states import CASES, Case, with_optimizer

SIZE, STEPS = 3, 4
KINDS = (SGD, Adadelta, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop)


def clipped(world_size: int, micro_batches: int = 1) -> Case:
    case = CASES["uneven_rows"](world_size)
    model, optimizer = case.things["model"], case.things["optimizer"]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def train(x: torch.Tensor) -> None:
        for part in x.chunk(micro_batches):
            (100 * model(part).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    return Case({**case.things, "schedule": schedule}, train)


def changed_by_script(world_size: int) -> Case:
    case = CASES["uneven_rows"](world_size)
    model, optimizer = case.things["model"], case.things["optimizer"]

    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        for parameter in list(model.parameters())[:2]:
            parameter.grad.clamp_(-1e-3, 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    return Case(case.things, train)


def evaluated(world_size: int) -> Case:
    case = CASES["uneven_rows"](world_size)
    model, optimizer = case.things["model"], case.things["optimizer"]

    def train(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            model(x)

    return Case(case.things, train)


NAMES = ("even", "uneven_rows", "fewer_rows_than_ranks", "mixed_precision", "bfloat16", "tied_parameters", "columns",
         "frozen_parameters", "offloaded", "two_models", "averaged", "foreach_adamw", "fused_adamw", "amsgrad", "adagrad",
         "sgd_momentum", "learning_rate_tensor")  # fmt: skip
SHADOWED: dict[str, Any] = {
    **{name: CASES[name] for name in NAMES},
    **{kind.__name__: with_optimizer(kind, foreach=False) for kind in KINDS},
    "clipped": clipped,
    "accumulated": partial(clipped, micro_batches=2),
    "changed_by_script": changed_by_script,
    "evaluated": evaluated,
    "changed_by_hook": with_optimizer(SGD),
}


class ModuleReduce:
    """The reduce-scatter of FSDP modules over `collectives`."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **_: Any) -> None:
        self._collectives.reduce(output_tensor, input_tensor, op, group.team)


def change_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)


class NotingLink(Link):
    """A link that notes whether gradients are sent."""

    has_sent = False

    def post(self, operation: str, *arguments: Any) -> Any:
        self.has_sent |= operation == "send"
        return super().post(operation, *arguments)


def compare(name: str, collectives: Collectives, link: NotingLink) -> tuple[list[int], bool]:
    """Train some steps. Return the ranks whose copy of the previous rank's shards differs, and if gradients were sent."""
    torch.manual_seed(5)
    case = SHADOWED[name](SIZE)
    modules = [m for thing in case.things.values() if isinstance(thing, nn.Module) for m in thing.modules()]
    for number, module in enumerate(module for module in modules if isinstance(module, FSDPModule)):
        module.set_custom_all_gather(ModuleGather(collectives, number))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(ModuleReduce(collectives))  # type: ignore[arg-type]
    own = OwnShards(Protected(case.things))
    copies = exchange_copies(own, collectives.link, collectives.ring, collectives.spare)

    def follow(optimizer_name: str) -> Any:
        def before_step(*_: Any) -> None:
            collectives.run(copies.exchange_gradients(optimizer_name, collectives.reductions))
            copies.step(optimizer_name)
            collectives.end_updates()

        return before_step

    for optimizer_name, optimizer in own.optimizers.items():
        optimizer.register_step_pre_hook(follow(optimizer_name))
    if name == "changed_by_hook":  # after the exchange of gradients
        for optimizer in own.optimizers.values():
            optimizer.register_step_pre_hook(change_gradients)
    parameter = next(iter(own.parameters.values()))
    link.has_sent = False
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + collectives.ring.rank)  # other samples on every rank
        case.train(torch.randn(8, parameter.shape[1], generator=generator).to(parameter.dtype))
        if own.averages:
            collectives.run(copies.exchange_averages())
        collectives.begin_step()
    states: list[Any] = [None] * SIZE
    dist.all_gather_object(states, (bits(own.capture()), bits(copies.capture()), copies.is_exact))
    different = [rank for rank in range(SIZE) if states[rank][1] != states[rank - 1][0]]
    assert [rank for rank in range(SIZE) if not states[rank][2]] == different, name  # each rank knows of its own copy
    return different, link.has_sent


def bits(state: dict[str, Any]) -> dict[str, list[int]]:
    flat = {**state[PARAMETERS]}
    for name, moments in state[MOMENTS].items():
        flat |= {f"{name}/{number}/{key}": value for number, keys in moments.items() for key, value in keys.items()}
    return {name: value.contiguous().reshape(-1).view(torch.uint8).tolist() for name, value in flat.items()}


def lost() -> bool:
    raise AssertionError("a connection broke although no rank was lost")


def main(folder: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    children = [pid for rank in range(SIZE) if (pid := start_rank(rank, store.port, folder))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


def start_rank(rank: int, port: int, folder: Path) -> int:
    if pid := os.fork():
        return pid
    torch.set_num_threads(1)
    shadow.PIECE = 1  # each parameter of the copy is stepped on its own, while some collective waits
    link, ring = NotingLink(), Ring(rank, SIZE)
    store = lambda: PrefixStore("ranks", TCPStore("127.0.0.1", port, is_master=False))  # noqa: E731
    link.connect(store, rank, SIZE, lambda: False)
    collectives = Collectives(link, ring, lost)
    replace_default_group_by_mesh(collectives, lambda _: None)  # all ranks make all collectives
    names = sys.argv[2:] or SHADOWED
    results = {name: compare(name, collectives, link) for name in names}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    os._exit(0)


if __name__ == "__main__":
    HashStore()  # torch.distributed is imported before the fork
    main(Path(sys.argv[1]))
