"""The workers of one mini-batch, simulated in one process, and a failure during their backward.

All replicas are equal before a step, so one model represents all of them. Each worker has the gradients of its share of
the samples, and its own buffers.

Backward computes gradients from the last layer to the first. If the optimizer steps inside backward (`inside`), each
layer is updated as soon as its gradients are summed, and after a failure only the upper layers of the model have moved.
`lossy_gradient` decides which gradients a failed step uses, as in a real run.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.live import lossy_gradient
from holdfast.live.lossy_gradient import Weights

Tensors: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function from a model's outputs and the targets to the mean loss over the samples."""
Layers: TypeAlias = tuple[tuple[str, ...], ...]
"""The names of the parameters of each layer, in the order of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The samples of one worker in a mini-batch, and the random seed (`key`) for its forward pass."""

    x: Tensor
    y: Tensor
    key: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class WorkerGradients:
    """The gradients of one worker by parameter name, and the model's buffers after the worker's forward pass."""

    samples: int
    gradients: Tensors
    buffers: Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A failure during the backward pass of a mini-batch, and the strategy that recovers from the failure."""

    strategy: str
    point: float  # fraction of the gradients that were applied before
    casualties: frozenset[int] = field(default_factory=frozenset)  # the lost workers; without any, nothing fails


def compute_gradients(
    model: nn.Module, shares: Sequence[Share], loss: Loss, wanted: Collection[str] | None = None
) -> list[WorkerGradients]:
    """Return the gradients of every simulated worker, for the parameters named in `wanted` (None: all parameters).

    `shares` has the samples of each worker. The model does not change."""
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (wanted is None or name in wanted)
    }
    before, workers = copy_tensors(model.named_buffers()), []
    for share in shares:
        with seeded(share.key, share.x.device):
            value = loss(model(share.x), share.y)
            tensors = torch.autograd.grad(value, list(parameters.values()), allow_unused=True) if parameters else ()
        gradients = {name: tensor for name, tensor in zip(parameters, tensors, strict=True) if tensor is not None}
        workers.append(WorkerGradients(len(share.y), gradients, copy_tensors(model.named_buffers())))
        copy_into(before, dict(model.named_buffers()))
    return workers


def copy_tensors(named: Iterator[tuple[str, Tensor]]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in named}


def copy_into(values: Tensors, targets: Tensors) -> None:
    with torch.no_grad():
        for name, value in values.items():
            targets[name].copy_(value)


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators with `key` inside the `with` block, and restore their states afterwards."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(key)  # torch.manual_seed would query every kind of device
        if is_cuda:
            torch.cuda.manual_seed(key)
        yield


def layers_of(model: nn.Module) -> Layers:
    """Return the names of the trainable parameters, grouped by the module that directly holds them."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return tuple(tuple(group) for _, group in groupby(names, key=lambda name: name.rpartition(".")[0]))


def completed_parameters(order: Layers, point: float) -> frozenset[str]:
    """Return the names of the parameters whose gradients were complete when the backward pass failed at `point`.

    `point` is a fraction of all parameters, and is rounded down to whole layers. The backward pass goes from the last
    layer in `order` to the first."""
    allowed = round(point * sum(map(len, order)), 6)  # 6: a product such as 0.7 x 10 must not fall short of 7
    done: list[str] = []
    for layer in reversed(order):
        if len(done) + len(layer) > allowed:
            break
        done += layer
    return frozenset(done)


def train_minibatch(
    model: nn.Module,
    optimizer: Optimizer,
    shares: Sequence[Share],
    loss: Loss,
    interruption: Interruption | None = None,
    *,
    inside: bool = True,
) -> None:
    """Train one mini-batch on all simulated workers, with the failure `interruption` if given.

    `shares` has the samples of each worker. If `inside`, the optimizer steps layer by layer during the backward pass,
    otherwise once after it."""
    wanted = None
    abandoned = ("skip", "replay") if inside else ("skip",)
    if interruption and interruption.casualties and interruption.strategy in abandoned:
        wanted = completed_parameters(layers_of(model), interruption.point)
    if apply_gradients(model, optimizer, compute_gradients(model, shares, loss, wanted), interruption, inside=inside):
        train_minibatch(model, optimizer, shares, loss, inside=inside)


def apply_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    workers: Sequence[WorkerGradients],
    interruption: Interruption | None = None,
    *,
    inside: bool = True,
) -> bool:
    """Step the optimizer with the gradients that survive the failure `interruption`, if any.

    If `inside`, the optimizer steps layer by layer during the backward pass, otherwise once after it. Return True if
    the mini-batch must be computed again."""
    order, samples = layers_of(model), [worker.samples for worker in workers]
    weights: dict[str, Weights | None] = dict.fromkeys(_flat(order), lossy_gradient.normal(samples))
    strategy, lost = (interruption.strategy, interruption.casualties) if interruption else ("", frozenset[int]())
    if interruption and lost:
        weights = _weights(order, samples, interruption, inside=inside)
    _step(model, optimizer, order, workers, weights, inside=inside)
    if lost and strategy == "skip" and not inside:
        return False  # a step that is dropped as a whole leaves the buffers unchanged too
    replaced = strategy == "replay" and not inside
    keeper = next((worker for worker in range(len(workers)) if replaced or worker not in lost), 0)
    copy_into(workers[keeper].buffers, dict(model.named_buffers()))
    return bool(lost) and strategy == "replay" and inside


def _weights(
    order: Layers, samples: Sequence[int], interruption: Interruption, *, inside: bool
) -> dict[str, Weights | None]:
    """Return for each parameter the weight of every worker's gradient in the failed step; None means no update."""
    strategy, casualties = interruption.strategy, interruption.casualties
    done = completed_parameters(order, interruption.point)
    weights = {
        name: lossy_gradient.weights(strategy, completed=name in done, samples=samples, casualties=casualties)
        for name in _flat(order)
    }
    if not inside:
        return weights
    if strategy == "replay":  # the step is abandoned; the mini-batch that runs again is exact
        weights = dict.fromkeys(weights)
    return weights | dict.fromkeys(done, lossy_gradient.normal(samples))  # applied before the failure, and not undone


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    order: Layers,
    workers: Sequence[WorkerGradients],
    weights: dict[str, Weights | None],
    *,
    inside: bool,
) -> None:
    """Step the optimizer with the weighted sum of the workers' gradients.

    A parameter with weight None does not change."""
    parameters = dict(model.named_parameters())
    optimizer.zero_grad(set_to_none=True)
    for names in reversed(order) if inside else [_flat(order)]:
        for name in names:
            total, own = None, weights[name]
            for worker, weight in zip(workers, own, strict=True) if own is not None else ():
                if weight and name in worker.gradients:
                    part = worker.gradients[name] * weight
                    total = part if total is None else total.add_(part)
            parameters[name].grad = total
        if any(parameters[name].grad is not None for name in names):
            optimizer.step()
        for name in names:
            parameters[name].grad = None


def _flat(order: Iterable[Iterable[str]]) -> list[str]:
    return [name for names in order for name in names]
