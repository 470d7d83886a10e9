"""Checks of what a script protects: refuse, before training, state that could not be restored after a failure.

Kinds of sharding are recognized by their classes, taken from the modules that the script has imported. The state of a
model that is refused is never read, because that may be a collective operation, which would hang.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import BadInput
from holdfast.train.state.differences import listed
from holdfast.train.state.protected import Protected

_OLD_MODULES = {("torch.distributed.fsdp", "FullyShardedDataParallel"): "FSDP (FullyShardedDataParallel)"}
_OLD_TENSORS = {("torch.distributed.fsdp._flat_param", "FlatParameter"): "FSDP (FullyShardedDataParallel)"}
_MODULES = {("torch.distributed.fsdp", "FSDPModule"): "FSDP2 (fully_shard)"}
_TENSORS = {("torch.distributed.tensor", "DTensor"): "DTensor"}


def check_sharding(things: Mapping[str, object], *, is_live: bool) -> None:
    """Raise BadInput if one of `things` (named models, optimizers or tensors) is sharded in an unsupported way.

    With `is_live` no sharding is supported: no other rank has the shard of a lost worker."""
    for name, thing in things.items():
        if kind := _sharding(thing, _OLD_MODULES, _OLD_TENSORS):
            raise BadInput(
                f"{name} is sharded with {kind}, which holdfast cannot save and restore: use fully_shard(model, mesh=run.mesh) "
                "(FSDP2), or run.replicate() if the model fits on one device."
            )
        kind = _sharding(thing, _MODULES, _TENSORS)
        if kind and is_live:
            raise BadInput(
                f"{name} is sharded with {kind}, so no other rank has the shard of a lost worker: choose --recovery restart, "
                "and leave out run.replicate()."
            )
        if kind and isinstance(thing, dict | list | torch.Tensor):
            raise BadInput(
                f"{name} is a plain {type(thing).__name__} with distributed tensors, of which every rank would save its own: "
                "put them into a module, or a class with state_dict and load_state_dict."
            )


def check_one_split(protected: Protected) -> None:
    """Raise BadInput if a parameter is sharded along several mesh dimensions: the ranks should train the same samples.

    That is tensor parallelism together with FSDP, on a mesh of which the run does not know."""
    for model in protected.models:
        for name, parameter in model.named_parameters():
            if sum(not placement.is_replicate() for placement in getattr(parameter, "placements", ())) > 1:
                raise BadInput(
                    f"{name} is sharded along two dimensions of its mesh, as with tensor parallelism, and this run gives every "
                    "rank its own samples: make the mesh with run.device_mesh(tensor_parallel=N)."
                )


def check_covers(protected: Protected, model: nn.Module) -> None:
    """Raise BadInput if a parameter of the replicated `model` would not be restored after a failure."""
    saved = {tensor.data_ptr() for tensor in _tensors(protected.capture())}
    lost = [name for name, value in model.named_parameters() if value.numel() and value.data_ptr() not in saved]
    if lost:
        raise BadInput(
            f"a replicated {type(model).__name__} is not protected ({listed(lost)}): name it in protect(), as in "
            "protect(model=model), or it would start again from its initial weights after a failure."
        )


def check_trainer(protected: Protected, optimizer: torch.optim.Optimizer) -> None:
    """Raise BadInput if `optimizer` trains a protected model but is not itself protected (saved and restored)."""
    trained = {id(parameter) for model in protected.models for parameter in model.parameters()}
    covered = {id(parameter) for trainer in protected.optimizers for parameter in _tensors(trainer)}
    if not protected.own_objects and any(id(parameter) in trained - covered for parameter in _tensors(optimizer)):
        raise BadInput(
            f"{type(optimizer).__name__} trains a protected model and is not protected: name it in protect(), as in "
            "protect(model=model, optimizer=optimizer), or it would lose its state after a failure."
        )


def check_replicated(protected: Protected, replicated: Iterable[nn.Module]) -> None:
    """Raise BadInput if an optimizer trains a model that is not in `replicated`: its weights would differ by rank."""
    shared = {id(parameter) for model in replicated for parameter in model.parameters()}
    for name, thing in protected.things.items():
        if isinstance(thing, torch.optim.Optimizer) and any(id(value) not in shared for value in _tensors(thing)):
            raise BadInput(
                f"{name} trains parameters of a model that is not replicated, and live recovery needs every rank to "
                "have the same: write model = run.replicate(model) before the optimizer is made, or choose "
                "--recovery restart."
            )


def check_schedules(protected: Protected) -> None:
    """Raise BadInput if a protected optimizer has a learning-rate scheduler that would not be restored."""
    covered = {id(thing.optimizer) for thing in protected.things.values() if isinstance(thing, LRScheduler)}
    for name, thing in protected.things.items():
        # A scheduler wraps the step of its optimizer, to see whether that is called before its own.
        scheduled = isinstance(thing, torch.optim.Optimizer) and hasattr(thing.step, "_wrapped_by_lr_sched")
        if scheduled and id(thing) not in covered and not protected.own_objects:
            raise BadInput(
                f"{name} has a learning-rate scheduler that is not protected: name it in protect(), as in "
                "protect(..., scheduler=scheduler), or it would lose its state after a failure."
            )


def _sharding(thing: object, modules: Mapping[tuple[str, str], str], tensors: Mapping[tuple[str, str], str]) -> str:
    """Return the name of the method that shards `thing` over the ranks, such as FSDP; empty if it is not sharded.

    `modules` and `tensors` map each class to look for, as (module, class name), to the name of its method."""
    parts = thing.modules() if isinstance(thing, nn.Module) else ()
    return _match(parts, modules) or _match(_tensors(thing), tensors)


def _tensors(thing: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model or optimizer, or of a nested state."""
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            yield from group["params"]
    elif isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping | list | tuple):
        for value in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _tensors(value)


def _match(values: Iterable[object], kinds: Mapping[tuple[str, str], str]) -> str:
    classes = {
        cls: kind for (module, name), kind in kinds.items() if (cls := getattr(sys.modules.get(module), name, None))
    }
    found = (kind for value in values for cls, kind in classes.items() if isinstance(value, cls))
    return next(found, "") if classes else ""
