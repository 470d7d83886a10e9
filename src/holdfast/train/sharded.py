"""Sharded models: the device mesh over the ranks of a run, and the weights of the ranks' gradients under FSDP2.

FSDP averages gradients over the ranks. If all ranks have equally many samples in a step, that is the mean over the
samples. If not, each rank's gradients are first multiplied by its number of samples, divided by the mean of all ranks.
The ranks of a tensor-parallel group have the same samples, and FSDP averages over the groups.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is public
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput
from holdfast.live.sharded.shard_recovery import ShardedRecovery
from holdfast.train.state.differences import listed
from holdfast.train.state.shards import is_dtensor

SHARD, REPLICATE, TENSOR = "shard", "replicate", "tensor"
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # its name before torch 2.13


def make_mesh(ranks: Ranks, replicas: int, tensor_parallel: int) -> DeviceMesh:
    """Return a device mesh over all ranks, with the dimensions `replicate`, `shard` and `tensor` in this order.

    Each of the `replicas` groups of ranks holds the whole model, sharded over the ranks of the group. Groups of
    `tensor_parallel` ranks train the same samples. A mesh with one replica lacks the dimension `replicate`, and one
    without tensor parallelism lacks `tensor`."""
    if tensor_parallel < 1 or ranks.size % tensor_parallel:
        raise BadInput(
            f"{ranks.size} ranks cannot be divided into tensor-parallel groups of {tensor_parallel}: start a multiple of "
            f"{max(1, tensor_parallel)} workers, or change tensor_parallel."
        )
    groups = ranks.size // tensor_parallel
    if replicas < 1 or groups % replicas:
        of = "ranks" if tensor_parallel == 1 else f"tensor-parallel groups of {tensor_parallel} ranks"
        raise BadInput(
            f"{groups} {of} cannot be divided into {replicas} replicas of the model: choose a number that divides {groups}."
        )
    if not dist.is_initialized():  # a script on its own: FSDP needs a process group, even of one process
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dims = {REPLICATE: replicas, SHARD: groups // replicas, TENSOR: tensor_parallel}
    dims = {name: size for name, size in dims.items() if size > 1 or name == SHARD}
    backends = backend_of_dims(ranks.device, dist.get_backend(), dims)
    shape, names = tuple(dims.values()), tuple(dims)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names, backend_override=backends)
    if tensor_parallel > 1:
        _synchronize_generators(mesh)
    return mesh


def backend_of_dims(device: torch.device, backend: str, dims: Iterable[int | str]) -> dict[int | str, Any] | None:
    """Return the backend for the groups of each dimension of a mesh, or None if torch chooses it.

    For ranks that share a GPU, which communicate over gloo, torch 2.11 would choose NCCL, which refuses them."""
    return dict.fromkeys(dims, backend) if device.type == "cuda" and backend == "gloo" else None


def _synchronize_generators(mesh: DeviceMesh) -> None:
    """Let torch do now what it does at the first random operation on distributed tensors of a CUDA device.

    All ranks then get the generator state of rank 0. In a resumed run this would be in another step than before."""
    if mesh.device_type != "cuda":
        return
    from torch.distributed import tensor

    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        tensor.rand(1, device_mesh=mesh)


def first_with_same_shards(parameters: Iterable[Any]) -> int | None:
    """Return the lowest rank that holds the same shards of all `parameters` as this rank, as with hybrid sharding.

    Return None if no other rank holds them."""
    groups = {_ranks_with_same_shard(parameter) for parameter in parameters}
    ranks = groups.pop() if len(groups) == 1 else ()
    return min(ranks) if len(ranks) > 1 else None


def _ranks_with_same_shard(parameter: Any) -> tuple[int, ...]:
    mesh, placement = parameter.device_mesh, parameter.placements[0]
    return tuple(mesh.mesh[(slice(None), *mesh.get_coordinate()[1:])].tolist()) if placement.is_replicate() else ()


def check_all_sharded(model: nn.Module) -> None:
    """Raise BadInput if a trained parameter of `model` is not sharded, because its gradients would not be averaged."""
    whole = [name for name, value in model.named_parameters() if value.requires_grad and not is_dtensor(value)]
    if whole:
        raise BadInput(
            f"{len(whole)} trained parameters are not sharded ({listed(whole)}), so the workers would not average their "
            "gradients: call fully_shard() for every layer, then for the whole model."
        )


class ShardedModels:
    """The models of a script that are sharded with FSDP2, and hooks into their gathers and reduce-scatters."""

    def __init__(self, models: Iterable[nn.Module], live: ShardedRecovery | None = None) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._modules: list[Any] = [
            module for model in models for module in model.modules() if isinstance(module, FSDPModule)
        ]
        states = _reducing_states(self._modules)
        self._are_whole = any(_ranks_of_shards(state) == 1 for state in states)
        self.reductions = sum(_ranks_of_shards(state) > 1 for state in states)
        """The number of reduce-scatters in a backward."""
        reduce_scatter = live.reduce_scatter if live else _reduce_scatter
        self._reduction = _GradientReduction(self.reductions, reduce_scatter)
        if live:
            live.route(self._modules)
            self._replace_reduction()

    def set_weight(self, factor: float) -> None:
        """Multiply this rank's gradients by `factor` before they are averaged over the ranks."""
        if self._are_whole:
            raise BadInput(
                "the replicas of the model train different numbers of samples in a step, and each replica is on one rank, "
                "where FSDP cannot weight its gradients: choose a global_batch that is a multiple of the number of replicas, "
                "or fewer replicas."
            )
        self._reduction.factor = factor
        self._replace_reduction()

    def watch_backward(self, posted: Callable[[Sequence[Any], int], None]) -> None:
        """Call `posted(works, count)` in every backward: before the first reduce-scatter, and after the start of each.

        `works` are the reduce-scatters of this backward that have started; `count` is their final number."""
        self._reduction.posted = posted
        self._replace_reduction()

    def on_gather(self, fraction: float, act: Callable[[], None]) -> None:
        """Call `act` once: in the next forward, when the given `fraction` of the FSDP modules have gathered parameters."""
        count = int(round(fraction * len(self._modules), 6))  # 6: 0.7 x 10 must not fall short of 7
        gathered = 0

        def on_forward(*_: Any) -> None:
            nonlocal gathered
            gathered += torch.is_grad_enabled()
            if gathered >= max(1, count):
                for hook in hooks:
                    hook.remove()
                act()

        hooks = [module.register_forward_pre_hook(on_forward) for module in self._modules]

    def _replace_reduction(self) -> None:
        for module in self._modules:
            module.set_custom_reduce_scatter(self._reduction)


def _reducing_states(modules: Iterable[Any]) -> list[Any]:
    """Return FSDP's state for each call of `fully_shard` with trained parameters, whose gradients are reduced together.

    Modules that one call has sharded share a state."""
    states = [module._get_fsdp_state() for module in modules if _has_parameters(module)]
    return list({id(state): state for state in states}.values())


def _ranks_of_shards(state: Any) -> int:
    """Return the number of ranks over which FSDP shards these parameters; with one, it calls no reduce-scatter."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # its name in older versions
    return int(groups[0].mesh_info.shard_mesh_size)


def _has_parameters(module: Any) -> bool:
    """Return True if an FSDP module shards trained parameters of its own, apart from those of FSDP modules inside it."""
    from torch.distributed.fsdp import FSDPModule

    shards = [child for child in module.modules() if child is not module and isinstance(child, FSDPModule)]
    inner = {id(parameter) for child in shards for parameter in cast(nn.Module, child).parameters()}
    return any(id(parameter) not in inner for parameter in module.parameters() if parameter.requires_grad)


class _GradientReduction:
    """A reduce-scatter for FSDP2 that multiplies this rank's gradients by `factor`, and calls `posted` when it starts."""

    def __init__(self, count: int, reduce_scatter: Callable[..., Any]) -> None:
        self.factor = 1.0
        self._reduce_scatter = reduce_scatter
        self.posted: Callable[[Sequence[Any], int], None] | None = None
        self._count = count
        self._works: list[Any] = []

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self.factor != 1.0:
            input_tensor.mul_(self.factor)
        if self.posted is None:
            return self._reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if len(self._works) in (0, self._count):
            self._works.clear()
            self.posted(self._works, self._count)
        work = self._reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._works.append(work or _Done())
        self.posted(self._works, self._count)
        return work


class _Done:
    """A collective that had completed when its call returned."""

    def wait(self) -> None:
        pass
