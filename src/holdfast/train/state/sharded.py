"""Refusal of sharded states. A snapshot holds whole tensors of one rank, and FSDP or DTensor leave each rank a part.

Reading a sharded state is often a collective operation, which would hang if rank 0 alone began it. So objects are
recognized by the classes of their modules and parameters, and their state is never read. The classes are taken from the
modules that the script has imported: holdfast need not import FSDP itself.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from holdfast.errors import BadInput

_MODULES = {
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): "FSDP (FullyShardedDataParallel)",
    ("torch.distributed.fsdp", "FSDPModule"): "FSDP2 (fully_shard)",
}
_TENSORS = {
    ("torch.distributed.fsdp._flat_param", "FlatParameter"): "FSDP (FullyShardedDataParallel)",
    ("torch.distributed.tensor", "DTensor"): "DTensor",
}


def refuse(things: Mapping[str, object]) -> None:
    """Raise BadInput if one of `things` (models, optimizers, tensors, by name) is divided among the ranks."""
    for name, thing in things.items():
        if kind := _sharding(thing):
            raise BadInput(
                f"{name} is sharded with {kind}, and holdfast saves and restores whole states only: use run.replicate() if "
                "the model fits on one device. Otherwise leave out protect() and save in the script; holdfast then only "
                "restarts it after failures."
            )


def _sharding(thing: object) -> str:
    """Return the name of the method that divides `thing` among the ranks, or an empty text."""
    modules = thing.modules() if isinstance(thing, nn.Module) else ()
    return _match(modules, _MODULES) or _match(_tensors(thing), _TENSORS)


def _tensors(thing: object) -> Iterator[object]:
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            yield from group["params"]
    elif isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict | list):
        for value in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(value)


def _match(values: Iterable[object], kinds: Mapping[tuple[str, str], str]) -> str:
    classes = {
        cls: kind for (module, name), kind in kinds.items() if (cls := getattr(sys.modules.get(module), name, None))
    }
    found = (kind for value in values for cls, kind in classes.items() if isinstance(value, cls))
    return next(found, "") if classes else ""
