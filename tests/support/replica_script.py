"""A script for the tests of the replica: in each of many ways, train on, train as after a resume, and compare the bits.

Every rank writes `sums-<rank>.json`: for each way what was found.
"""

import copy
import json
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from holdfast.distributed import ranks
from holdfast.errors import BadInput
from holdfast.train.replicate import Replica

WORDS, STEPS = 3000, 3
UNEVEN = (0.5, 0.2, 0.3)


class Tied(nn.Module):
    """Large enough for the order of a sum over ranks to show; two kinds of numbers, shared and frozen parameters."""

    def __init__(self, idle: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 128), nn.LayerNorm(128)
        self.last, self.first = nn.Linear(2000, 128), nn.Linear(128, 2000)  # not in the order of their use
        self.precise = nn.Linear(128, 128, dtype=torch.float64)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.head = nn.Linear(128, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Linear(300, 300) if idle else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.last(F.relu(self.first(self.frozen(self.embed(x))))))
        return self.head(self.precise(x.double()).float())


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "uneven": {"weights": UNEVEN},
    "views": {"gradient_as_bucket_view": True},
    "uneven views": {"gradient_as_bucket_view": True, "weights": UNEVEN},
    "small buckets": {"bucket_cap_mb": 1},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Trained:
    """A replica that is trained step by step; a step's batches follow from its number and the rank alone."""

    def __init__(self, way: str, rank: int, state: dict[str, torch.Tensor] | None = None) -> None:
        options = dict(WAYS[way])
        weights = options.pop("weights", None)
        self.rank = rank
        self.accumulates = "static_graph" not in options  # torch cannot hold back the first backward of a static graph
        torch.manual_seed(0)
        net = Tied(idle=way in ("unused", "static"))
        net.load_state_dict(state or net.state_dict())
        self.events: list[str] = []
        self.replica = Replica(net, options, meanwhile=lambda: self.events.append("meanwhile"))
        if weights:
            self.replica.set_weight(weights[rank])

    def gradients(self, step: int) -> list[torch.Tensor]:
        """Two backward passes, the first one held back."""
        net = self.replica.ddp
        net.zero_grad()
        for part in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + self.rank)
            x = torch.randint(WORDS, (16,), generator=generator)
            with net.no_sync() if self.accumulates and not part else nullcontext():
                F.cross_entropy(net(x), x).backward()
        return [each.grad for each in net.parameters() if each.grad is not None]

    def step(self, number: int) -> None:
        self.gradients(number)
        with torch.no_grad():
            self.replica.ddp(torch.zeros(1, dtype=torch.int64))  # no training: it counts for nothing
            for each in self.replica.ddp.parameters():
                if each.grad is not None:
                    each -= 0.1 * each.grad

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.replica.ddp.module.state_dict().items()}

    def buckets(self) -> list[int]:
        return [len(each.parameters()) for each in self.replica.ddp.reducer._get_zeros_like_grad_buckets()]


def report(way: str, rank: int) -> dict[str, Any]:
    """What comes of a way to replicate."""
    on = Trained(way, rank)
    layouts = [on.buckets()]
    for number in range(STEPS):
        if number == STEPS - 1:
            before = on.state()
        on.step(number)
        layouts.append(on.buckets())
    resumed = Trained(way, rank, before)
    resumed.step(STEPS - 1)
    ours, theirs = on.state(), resumed.state()
    replica = on.replica
    return {
        "same": all(torch.equal(ours[name], theirs[name]) for name in ours),
        "layouts": layouts,
        "reduced": replica.reduced,
        "held": replica.held,
    }


def error(way: str, rank: int) -> float:
    """How far a gradient is at most from the weighted sum of every rank's own."""
    trained, alone = Trained(way, rank), Trained(way, rank)
    alone.accumulates = False
    with alone.replica.ddp.no_sync():
        own = alone.gradients(0)
    worst = 0.0
    for summed, ours in zip(trained.gradients(0), own, strict=True):
        expected = ours.double() * trained.replica.weight
        dist.all_reduce(expected)
        worst = max(worst, float((summed - expected).abs().max()))
    return worst


def order(rank: int) -> list[str]:
    """What happens in a backward, one after the other."""
    trained, sum_of = Trained("uneven", rank), dist.all_reduce
    happened = trained.events

    def counted(*args: Any, **options: Any) -> Any:
        happened.append("sum")
        return sum_of(*args, **options)

    dist.all_reduce = counted
    trained.gradients(0)
    dist.all_reduce = sum_of
    assert happened.count("sum") == len(trained.buckets())
    return happened


def asked_inside(rank: int) -> list[str]:
    """Which model DDP says is in its forward: in the first one, in the second, in one that fails, and after it."""
    trained, told = Trained("default", rank), list[str]()

    def ask(*_: Any) -> None:
        active = DistributedDataParallel._get_active_ddp_module()
        told.append("ours" if active is trained.replica.ddp else repr(active))

    trained.replica.ddp.module.norm.register_forward_hook(ask)
    trained.accumulates = False
    trained.gradients(0)
    with suppress(IndexError):
        trained.replica.ddp(torch.tensor([WORDS]))
    ask()
    return told


def refused(action: Callable[[], object]) -> str:
    """What is said of an action that is refused."""
    try:
        action()
    except BadInput as problem:
        return str(problem)
    return ""


def steps_inside(rank: int) -> str:
    """What is said of optimizers that step inside backward: they would step before gradients are summed."""
    trained = Trained("default", rank)
    learning = [param for param in trained.replica.ddp.parameters() if param.requires_grad]
    _apply_optimizer_in_backward(torch.optim.SGD, learning, {"lr": 0.1})
    return refused(lambda: trained.replica.ddp(torch.zeros(1, dtype=torch.int64)).sum().backward())


def main() -> None:
    torch.set_num_threads(1)
    rank = ranks.join(60.0).rank
    found: dict[str, Any] = {way: report(way, rank) for way in WAYS}
    found["errors"] = {way: error(way, rank) for way in ("default", "uneven", "uneven views")}
    one, other = Trained("default", rank), Trained("default", rank)
    one.step(0)
    found["two"] = [(each.replica.reduced, each.replica.held) for each in (one, other)]
    found["hook"] = refused(lambda: one.replica.ddp.register_comm_hook(None, lambda *_: None))
    found["order"] = order(rank)
    found["inside"] = steps_inside(rank)
    found["asked"] = asked_inside(rank)
    found["copied"] = torch.equal(copy.deepcopy(one.replica.ddp).module.embed.weight, one.state()["embed.weight"])
    Path(os.environ["HOLDFAST_OUT"], f"sums-{rank}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main()
