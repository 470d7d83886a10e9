"""The default process group of a sharded run with live recovery: all its collectives survive the loss of a worker.

The device mesh of the run uses this group, so the collectives of distributed tensors pass through it, such as the
all-reduce of `clip_grad_norm_`. Collectives that the script calls itself pass through it too. A mesh with two dimensions,
for hybrid sharding, makes such a group for the ranks along each dimension. FSDP2 has two public hooks for its own
collectives, all-gather and reduce-scatter. With the first hook, it is known which module is gathered.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]  # they are public

from holdfast.distributed.gloo_link import CompletedWork
from holdfast.distributed.process_group import leave_default_group
from holdfast.errors import BadInput
from holdfast.live.sharded.collectives import Collectives
from holdfast.live.sharded.operations import AllReduce, Team

BACKEND = "holdfast_sharded"


class MeshGroup(ProcessGroup):
    """A process group of a team of ranks whose collectives are numbered, repeated and served by `collectives`."""

    outlives_workers = True

    def __init__(self, collectives: Collectives, team: Team) -> None:
        super().__init__(team.ring.rank, team.ring.size)  # type: ignore[call-arg]  # this form exists
        self._collectives, self.team = collectives, team
        self._name = self._description = ""

    # torch.distributed asks a group for its names by these methods.
    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def allreduce(self, tensors: Any, opts: Any = None) -> CompletedWork:  # type: ignore[override]
        tensors = tensors if isinstance(tensors, list) else [tensors]
        self._collectives.run(AllReduce(tensors, getattr(opts, "reduceOp", None)), self.team)
        return CompletedWork(tensors)

    allreduce_coalesced = allreduce

    def barrier(self, opts: Any = None) -> CompletedWork:
        return self.allreduce([torch.zeros(1)])

    def all_gather_single(self, output: torch.Tensor, values: torch.Tensor, opts: Any = None) -> CompletedWork:
        self._collectives.gather(output, values, team=self.team)
        return CompletedWork([output])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        for output, values in zip(outputs, inputs, strict=True):
            self._collectives.gather(output, values, team=self.team)
        return CompletedWork(outputs)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        for parts, values in zip(outputs, inputs, strict=True):
            gathered = values.new_empty(len(parts), *values.shape)
            self._collectives.gather(gathered, values, team=self.team)
            for part, value in zip(parts, gathered, strict=True):
                part.copy_(value)
        return CompletedWork(outputs[0])

    def reduce_scatter_single(self, output: torch.Tensor, values: torch.Tensor, opts: Any = None) -> CompletedWork:
        self._collectives.reduce(output, values, getattr(opts, "reduceOp", None), self.team)
        return CompletedWork([output])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CompletedWork:
        for output, values in zip(outputs, inputs, strict=True):
            self._collectives.reduce(output, values, getattr(opts, "reduceOp", None), self.team)
        return CompletedWork(outputs)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> CompletedWork:  # type: ignore[override]
        # As a sum of bytes, of which only the root's are not zero: a broadcast itself ends on the root at once.
        for tensor in tensors:
            values = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
            total = values.clone() if self.team.ring.rank == opts.rootRank else torch.zeros_like(values)
            self._collectives.run(AllReduce([total], None), self.team)
            tensor.copy_(total.view(tensor.dtype).view(tensor.shape))
        return CompletedWork(tensors)


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise BadInput(
            f"torch.distributed's {name} is not supported with a sharded model and --recovery replay, which repeats an "
            "interrupted step's collectives: use all_reduce, all_gather, broadcast or barrier, or choose --recovery restart."
        )

    return refuse


_EARLIER_NAMES = {  # before torch 2.13
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}
for _earlier, _name in _EARLIER_NAMES.items():
    setattr(MeshGroup, _earlier, getattr(MeshGroup, _name))
for _name in ("all_to_all_single", "alltoall", "alltoall_base", "gather", "monitored_barrier", "recv", "reduce",
              "reduce_scatter", "scatter", "send"):  # fmt: skip
    setattr(MeshGroup, _name, _refuse(_name))


def replace_default_group_by_mesh(collectives: Collectives, connect: Callable[[Team], None]) -> None:
    """Make a `MeshGroup` the default process group, and let every new group of some ranks be one too.

    `connect` is called with the team of each new group that this rank belongs to."""
    leave_default_group()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND, lambda options, _: _makers[-1](options), extended_api=True, devices=["cpu", "cuda"]
        )

    def make_group(options: Any) -> MeshGroup:
        members = tuple(options.global_ranks_in_group) or collectives.world.members  # none for the default group
        return MeshGroup(collectives, collectives.team(members, connect))

    _makers.append(make_group)
    ring = collectives.ring
    dist.init_process_group(BACKEND, store=HashStore(), rank=ring.rank, world_size=ring.size)


_makers: list[Callable[[Any], MeshGroup]] = []


class ModuleGather:
    """The all-gather of one FSDP module. The gathered values do not change between two optimizer steps."""

    def __init__(self, collectives: Collectives, module: int) -> None:
        self._collectives, self._module = collectives, module

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: MeshGroup,
        async_op: bool = False,
    ) -> None:
        key = self._module, input_tensor.dtype, group.team.name
        self._collectives.gather(output_tensor, input_tensor, key, group.team)
