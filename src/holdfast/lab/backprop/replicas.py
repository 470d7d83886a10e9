"""The workers of one mini-batch in one process: each one's own gradients, from its share of the samples.

All replicas are equal before a step, so one model stands for all of them. A worker's gradients are those of the mean
loss of its share, as in data-parallel training; layers such as BatchNorm see that share alone, and what a forward does
to buffers is kept for each worker. A share has a key, from which all random numbers of its forward follow: computed
again, it gives the same gradients.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

Tensors: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From a model's outputs and the targets to the mean over the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The samples of one worker, and the key of the random numbers that its forward draws."""

    x: Tensor
    y: Tensor
    key: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What one worker has computed: its gradients by the name of the parameter, and the buffers that its forward left."""

    samples: int
    gradients: Tensors
    buffers: Tensors


def computed(
    model: nn.Module, shares: Sequence[Share], loss: Loss, wanted: Collection[str] | None = None
) -> list[Computed]:
    """Every worker's gradients; the model stays as it is. `wanted` ends backward after these parameters."""
    return [_computed(model, share, loss, wanted) for share in shares]


def _computed(model: nn.Module, share: Share, loss: Loss, wanted: Collection[str] | None) -> Computed:
    parameters = {
        name: each
        for name, each in model.named_parameters()
        if each.requires_grad and (wanted is None or name in wanted)
    }
    before = copied(model.named_buffers())
    with keyed(share.key, share.x.device):
        value = loss(model(share.x), share.y)
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True) if parameters else ()
    gradients = {name: each for name, each in zip(parameters, found, strict=True) if each is not None}
    after = copied(model.named_buffers())
    put(before, dict(model.named_buffers()))
    return Computed(len(share.y), gradients, after)


def copied(named: Iterator[tuple[str, Tensor]]) -> Tensors:
    """Copies that no later step changes."""
    return {name: each.detach().clone() for name, each in named}


def put(values: Tensors, into: Tensors) -> None:
    """Copy values into tensors of the same names."""
    with torch.no_grad():
        for name, value in values.items():
            into[name].copy_(value)


@contextmanager
def keyed(key: int, device: torch.device) -> Iterator[None]:
    """Random numbers from this key; afterwards the generators are as they were."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(key)  # torch.manual_seed asks every kind of device
        if is_cuda:
            torch.cuda.manual_seed(key)
        yield
