"""A model on every rank: the same start, and gradients summed over the ranks, each weighted by its share of the window.

The sum is layout-free. DDP reduces gradients in buckets, and learns a better order for them in the first backward
of every process; the ring behind an all-reduce adds up the ranks in an order that depends on where a value lies in
its bucket. So a resumed process, which has yet to learn, would round differently from one that was never stopped
(seen from three ranks and about a megabyte on). Ours is told the order before the first backward, and then learns no
other: it depends on nothing but the model.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from holdfast import progress
from holdfast.errors import BadInput

_NONE = -1  # as torch numbers the backward pass that is under way when there is none


class Replica:
    """One replicated model: how its gradients are weighted, and how often they were summed."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.reduced = 0
        """Backward passes whose gradients were summed to the last bucket."""
        self.held = 0
        """Forward passes of training whose gradients stay on this rank until a later one is reduced."""
        group: ProcessGroup = options.get("process_group") or dist.distributed_c10d._get_default_group()
        self._even = 1.0 / group.size()
        self.weight = self._even
        self._backward = _NONE
        self.ddp = _Settled(model, **options | {"process_group": _Summing(group, self)})
        self.ddp.settle()
        # Not for torch.compile to look into, or it would compile again for every count.
        self.ddp.register_forward_pre_hook(torch.compiler.disable(self._before_forward))

    def before_sum(self, bucket: torch.Tensor) -> None:
        """Weigh the gradients of this rank, which DDP has divided by the number of ranks, and count."""
        if self.weight != self._even:
            bucket.mul_(self.weight / self._even)
        progress.here.posts()
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self.reduced += 1
        self._backward = _NONE

    def _before_forward(self, *_: object) -> None:
        if torch.is_grad_enabled() and not self.ddp.require_backward_grad_sync:
            self.held += 1


class _Settled(DistributedDataParallel):
    """DDP whose buckets are final before the first backward.

    With `find_unused_parameters` they are so by themselves. Else DDP puts everything into one bucket at first, and
    then builds buckets in the order in which gradients came. We have it build them at once, from the last parameter to
    the first, which is about the order in which gradients come.
    """

    _final = False

    def __init__(
        self, module: nn.Module, *, find_unused_parameters: bool = False, static_graph: bool = False, **options: Any
    ) -> None:
        self._rebuilds = static_graph or not find_unused_parameters
        super().__init__(module, find_unused_parameters=find_unused_parameters, static_graph=static_graph, **options)

    def settle(self) -> None:
        """Build the final buckets; DDP does so once."""
        if self._rebuilds:
            self.reducer._push_all_rebuilt_params()
            self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        self._final = True

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refused once the replica is made: a hook's sums would be neither weighted by share nor counted."""
        if self._final:
            raise BadInput("a replicated model sums its gradients itself: leave out register_comm_hook")
        super().register_comm_hook(state, hook)  # DDP's own, for its option mixed_precision

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._rebuilds else (parameters, sparse)

    def _check_default_group(self) -> None:
        """A copy, as one that averages weights is made of, may go without our group: it is not trained."""


class _Summing(ProcessGroup):
    """The group of all ranks as DDP sees it: its own operations, in place, and a replica that is told of every sum."""

    def __init__(self, group: ProcessGroup, replica: Replica) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # torch has this one too
        self._group, self._replica = group, replica

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:  # type: ignore[override]  # as DDP calls it
        """DDP sums gradients, and a map of the parameters that were used, which is of integers."""
        if tensors[0].dtype is not torch.int32:
            self._replica.before_sum(tensors[0])
        return self._group.allreduce(tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:  # type: ignore[override]
        """The first weights, buffers before a forward."""
        return self._group.broadcast(tensors, options)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> Work:
        """Whether all ranks have the same model."""
        return self._group.allgather(outputs, inputs, options)

    def getBackendName(self) -> str:
        """For DDP's log."""
        return "holdfast"


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, inside of DDP or not."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def holding_back(replicas: Iterable[Replica]) -> ExitStack:
    """A context in which backward adds up gradients on this rank alone."""
    with ExitStack() as stack:
        for each in replicas:
            stack.enter_context(each.ddp.no_sync())
        return stack.pop_all()
