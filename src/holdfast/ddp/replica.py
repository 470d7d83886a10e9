"""A model on every rank: the same start, and gradients summed over the ranks, each weighted by its share of the window.

The sum is layout-free. DDP reduces gradients in buckets, and learns a better order for them in the first backward
of every process; the ring behind an all-reduce adds up the ranks in an order that depends on where a value lies in
its bucket. So a resumed process, which has yet to learn, would round differently from one that was never stopped
(seen from three ranks and about a megabyte on). Ours are grouped once, by the model alone, and reduced group by group
whatever buckets they come in.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is public
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel

FIRST_GROUP = 1 << 20  # bytes; as DDP's own buckets: a small first one, so that the reduction starts early
GROUP = 25 << 20


@dataclass(slots=True, eq=False)
class Group:
    """Parameters whose gradients are reduced together, and the memory in which they are when DDP's buckets differ."""

    parameters: list[torch.Tensor]
    flat: torch.Tensor | None = None
    views: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    missing: int = 0
    reduced: Future[torch.Tensor] | None = None

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Future[torch.Tensor]:
        """Put one gradient in its place; with the last of them the reduction starts. The future is of all of them."""
        if self.flat is None:
            self._allocate()
        if self.reduced is None:
            self.reduced = Future(devices=[gradient.device] if gradient.is_cuda else None)
            self.missing = len(self.parameters)
        self.views[parameter].copy_(gradient)
        self.missing -= 1
        reduced = self.reduced
        if not self.missing:
            self._reduce(reduced)
            self.reduced = None
        return reduced

    def release(self) -> None:
        """Give back the memory, which is not needed while DDP's bucket is this very group."""
        self.flat, self.views = None, {}

    def _allocate(self) -> None:
        first = self.parameters[0]
        self.flat = torch.empty(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        parts = self.flat.split([p.numel() for p in self.parameters])
        self.views = dict(zip(self.parameters, parts, strict=True))

    def _reduce(self, reduced: Future[torch.Tensor]) -> None:
        def settle(work: Future[list[torch.Tensor]]) -> None:
            try:
                reduced.set_result(work.value()[0])
            except RuntimeError as error:  # a peer is gone: DDP waits for this future and must learn of it
                reduced.set_exception(error)  # type: ignore[arg-type]  # annotated for a result

        _summed(self.flat).add_done_callback(settle)


class Replica:
    """One replicated model: how its gradients are weighted and reduced."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.ddp = DistributedDataParallel(model, **options)
        self.weight = 1.0 / dist.get_world_size()
        # DDP leaves out what it was told to ignore; a group that waits for it would never be complete.
        parameters = [each for each in model.parameters() if each.requires_grad and not hasattr(each, "_ddp_ignored")]
        self._groups = grouped(reversed(parameters))
        self._group_of = {each: group for group in self._groups for each in group.parameters}
        self.ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, _: None, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer().mul_(self.weight)
        parameters = bucket.parameters()
        group = self._group_of[parameters[0]]
        if _same(parameters, group.parameters):  # as it is in the long run: DDP learns what we assume
            group.release()
            return _summed(buffer).then(lambda work: work.value()[0])
        gradients = buffer.split([each.numel() for each in parameters])  # as they lie in memory, whatever their strides
        waits = [self._group_of[p].take(p, g) for p, g in zip(parameters, gradients, strict=True)]

        def back(done: Future[list[Future[torch.Tensor]]]) -> torch.Tensor:
            for each in done.value():
                each.value()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                gradient.copy_(self._group_of[parameter].views[parameter])
            return buffer

        return collect_all(list(dict.fromkeys(waits))).then(back)


def grouped(parameters: Iterable[torch.Tensor]) -> list[Group]:
    """Parameters in groups of one kind and about `GROUP` bytes, in order; it depends on nothing but the model."""
    groups: list[Group] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    limit = FIRST_GROUP
    for each in parameters:
        kind = (each.dtype, each.device)
        members = filling.setdefault(kind, [])
        members.append(each)
        if sum(member.nbytes for member in members) >= limit:
            groups.append(Group(filling.pop(kind)))
            limit = GROUP
    return groups + [Group(members) for members in filling.values()]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, inside of DDP or not."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def holding_back(replicas: Iterable[Replica]) -> ExitStack:
    """A context in which backward adds up gradients on this rank alone."""
    with ExitStack() as stack:
        for each in replicas:
            stack.enter_context(each.ddp.no_sync())
        return stack.pop_all()


def _summed(tensor: torch.Tensor | None) -> Future[list[torch.Tensor]]:
    work = dist.all_reduce(tensor, async_op=True)
    future: Future[list[torch.Tensor]] = work.get_future()
    return future


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
