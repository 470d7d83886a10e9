"""A failure inside back-propagation: layers that were updated stay updated, and a strategy decides about the rest.

Gradients come from the last layer to the first. Training that steps its optimizer `inside` backward updates a layer as
soon as its gradients are summed, so a failure leaves a model of which only the upper layers have moved. Training that
steps after backward leaves a consistent model. What a failed step's gradient is, `salvage` says, here as in a real run.

The workers of one mini-batch in one process: each one's own gradients, from its share of the samples.

All replicas are equal before a step, so one model stands for all of them. A worker's gradients are those of the mean
loss of its share, as in data-parallel training; layers such as BatchNorm see that share alone, and what a forward does
to buffers is kept for each worker. A share has a key, from which all random numbers of its forward follow: computed
again, it gives the same gradients.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import BadInput
from holdfast.live import lossy_gradient
from holdfast.live.lossy_gradient import Weights

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
class WorkerGradients:
    """What one worker has computed: its gradients by the name of the parameter, and the buffers that its forward left."""

    samples: int
    gradients: Tensors
    buffers: Tensors


def compute_gradients(
    model: nn.Module, shares: Sequence[Share], loss: Loss, wanted: Collection[str] | None = None
) -> list[WorkerGradients]:
    """Every worker's gradients; the model stays as it is. `wanted` ends backward after these parameters."""
    return [_computed(model, share, loss, wanted) for share in shares]


def _computed(model: nn.Module, share: Share, loss: Loss, wanted: Collection[str] | None) -> WorkerGradients:
    parameters = {
        name: each
        for name, each in model.named_parameters()
        if each.requires_grad and (wanted is None or name in wanted)
    }
    before = copy_tensors(model.named_buffers())
    with seeded(share.key, share.x.device):
        value = loss(model(share.x), share.y)
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True) if parameters else ()
    gradients = {name: each for name, each in zip(parameters, found, strict=True) if each is not None}
    after = copy_tensors(model.named_buffers())
    copy_into(before, dict(model.named_buffers()))
    return WorkerGradients(len(share.y), gradients, after)


def copy_tensors(named: Iterator[tuple[str, Tensor]]) -> Tensors:
    """Copies that no later step changes."""
    return {name: each.detach().clone() for name, each in named}


def copy_into(values: Tensors, into: Tensors) -> None:
    """Copy values into tensors of the same names."""
    with torch.no_grad():
        for name, value in values.items():
            into[name].copy_(value)


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[None]:
    """Random numbers from this key; afterwards the generators are as they were."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(key)  # torch.manual_seed asks every kind of device
        if is_cuda:
            torch.cuda.manual_seed(key)
        yield


Layers: TypeAlias = tuple[tuple[str, ...], ...]
"""The names of the parameters of each layer, in the order of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A failure in the backward of one mini-batch, and what is done about it.

    `point` is the fraction of the gradients, in reverse layer order, that were summed and applied before; or the name
    of the layer at which it strikes, which is then the first that was not. Without casualties nothing fails.
    """

    strategy: str
    point: float | str
    casualties: frozenset[int] = field(default_factory=frozenset)


def layers_of(model: nn.Module) -> Layers:
    """The trainable parameters by layer: those that one module holds itself are a layer."""
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    return tuple(tuple(group) for _, group in groupby(names, key=_module))


def completed_parameters(order: Layers, point: float | str) -> frozenset[str]:
    """The parameters whose gradients are summed when the failure strikes: whole layers, from the last one on."""
    if isinstance(point, str):
        return _behind(order, point)
    if not 0 <= point <= 1:
        raise BadInput(f"a point {point} of back-propagation is outside [0, 1]: 0 is its start and 1 its end")
    room = round(point * sum(map(len, order)), 6)  # 6: a product such as 0.7 x 10 must not fall short of 7
    done: list[str] = []
    for layer in reversed(order):
        if len(done) + len(layer) > room:
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
    """Train one mini-batch on all workers, interrupted or not.

    A mini-batch that is abandoned costs what was done of it: its forward, and backward up to the failure.
    """
    wanted = None
    if interruption and interruption.casualties and _abandons(interruption, inside=inside):
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
    """Take the step that an interruption leaves of these gradients; says whether the mini-batch must run again."""
    order = layers_of(model)
    samples = [worker.samples for worker in workers]
    if interruption is None or not interruption.casualties:
        entering: dict[str, Weights | None] = dict.fromkeys(_all(order), lossy_gradient.normal(samples))
        _apply(model, optimizer, order, workers, entering, inside=inside)
        copy_into(workers[0].buffers, dict(model.named_buffers()))
        return False
    entering = _entering(order, samples, interruption, inside=inside)
    _apply(model, optimizer, order, workers, entering, inside=inside)
    if inside or interruption.strategy != "skip":  # a step that is dropped whole leaves the buffers as they were too
        copy_into(workers[_keeper(interruption, len(workers), inside=inside)].buffers, dict(model.named_buffers()))
    return inside and interruption.strategy == "replay"


def _abandons(interruption: Interruption, *, inside: bool) -> bool:
    """Whether nobody needs the gradients that a failed backward had yet to compute."""
    return interruption.strategy == "skip" or (interruption.strategy == "replay" and inside)


def _entering(
    order: Layers, samples: Sequence[int], interruption: Interruption, *, inside: bool
) -> dict[str, Weights | None]:
    """The weights of every parameter's gradients in the failed step."""
    strategy, casualties = interruption.strategy, interruption.casualties
    done = completed_parameters(order, interruption.point)
    entering = {
        name: lossy_gradient.weights(strategy, completed=name in done, samples=samples, casualties=casualties)
        for name in _all(order)
    }
    if not inside:
        return entering
    if strategy == "replay":  # the step was abandoned; it is exact only in the mini-batch that runs again
        entering = dict.fromkeys(entering)
    return entering | dict.fromkeys(
        done, lossy_gradient.normal(samples)
    )  # applied before the failure: nobody takes it back


def _apply(
    model: nn.Module,
    optimizer: Optimizer,
    order: Layers,
    workers: Sequence[WorkerGradients],
    entering: dict[str, Weights | None],
    *,
    inside: bool,
) -> None:
    """Step the optimizer layer by layer, or once for all of them; a parameter without weights does not move."""
    parameters = dict(model.named_parameters())
    optimizer.zero_grad(set_to_none=True)
    for names in reversed(order) if inside else [_all(order)]:
        for name in names:
            parameters[name].grad = _summed(workers, name, entering[name])
        if any(parameters[name].grad is not None for name in names):
            optimizer.step()
        for name in names:
            parameters[name].grad = None


def _summed(workers: Sequence[WorkerGradients], name: str, weights: Weights | None) -> Tensor | None:
    """The weighted sum over the workers, in their order; those of weight 0 take no part."""
    if weights is None:
        return None
    total: Tensor | None = None
    for worker, weight in zip(workers, weights, strict=True):
        if weight and name in worker.gradients:
            part = worker.gradients[name] * weight
            total = part if total is None else total.add_(part)
    return total


def _keeper(interruption: Interruption, world: int, *, inside: bool) -> int:
    """The worker whose buffers the model goes on with: the first, or after a loss the first survivor."""
    if interruption.strategy == "replay" and not inside:
        return 0  # its casualties are replaced
    return next((worker for worker in range(world) if worker not in interruption.casualties), 0)


def _behind(order: Layers, layer: str) -> frozenset[str]:
    found = [number for number, names in enumerate(order) if _module(names[0]) == layer]
    if not found:
        raise BadInput(f"there is no layer {layer!r}; choose among {', '.join(_module(names[0]) for names in order)}")
    return frozenset(_all(order[found[0] + 1 :]))


def _all(order: Iterable[Iterable[str]]) -> list[str]:
    return [name for names in order for name in names]


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
