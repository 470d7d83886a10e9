"""The shadow of a rank's shards: a copy on the next rank that makes the same optimizer steps.

Each rank sends its final gradients to the next rank just before its optimizer steps, after clipping and scaling. The
next rank steps its copy of the parameters and moments with them. The optimizers of torch compute every element on its
own, so the copy has the same bits at every step.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from holdfast.distributed.gloo_link import GroupBroken, Link
from holdfast.errors import BadInput
from holdfast.live.sharded.collectives import Ring
from holdfast.train.state.plain_values import PlainState
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import is_dtensor, like, local

ELEMENTWISE = (SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop)
_SCALER_INPUTS = ("grad_scale", "found_inf")  # a gradient scaler sets these on fused optimizers
PARAMETERS, MOMENTS = "parameters", "moments"


def check_optimizers(protected: Protected) -> None:
    """Raise BadInput if a protected optimizer does not compute every element of a parameter on its own."""
    for name, thing in protected.things.items():
        if isinstance(thing, Optimizer) and type(thing) not in ELEMENTWISE:
            raise BadInput(
                f"{name} is a {type(thing).__name__}: with --recovery replay, a neighbour repeats each rank's optimizer "
                "steps on a copy of its shard, which needs an optimizer of torch.optim that computes each element on "
                "its own, such as AdamW or SGD. Choose one, or --recovery restart."
            )


class OwnShards:
    """The shards of the protected models and optimizers that this rank trains.

    The parameters are found when this object is made, outside of a step: within one, FSDP puts gathered parameters in
    the place of the sharded ones."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self.parameters: dict[str, Any] = {}
        known: set[int] = set()
        for name, thing in protected.things.items():
            if isinstance(thing, nn.Module):
                for key, parameter in thing.named_parameters():
                    if is_dtensor(parameter) and id(parameter) not in known:
                        known.add(id(parameter))
                        self.parameters[f"{name}/{key}"] = parameter
        self.optimizers: dict[str, Optimizer] = {
            name: thing for name, thing in protected.things.items() if isinstance(thing, Optimizer)
        }
        trained = {id(parameter) for optimizer in self.optimizers.values() for parameter in trained_by(optimizer)}
        self._untrained = [value for value in self.parameters.values() if id(value) not in trained]
        self._versions = self._version_of_untrained()

    def have_untrained_changed(self) -> bool:
        """Return True if a sharded parameter that no protected optimizer trains has changed, such as an average."""
        return self._version_of_untrained() != self._versions

    def _version_of_untrained(self) -> list[int]:
        return [local(value)._version for value in self._untrained]

    def capture(self) -> dict[str, Any]:
        """Return the values of all shards and of their optimizer states, without copying them."""
        return {
            PARAMETERS: {name: local(value).detach() for name, value in self.parameters.items()},
            MOMENTS: {name: _moments(trained_by(optimizer), optimizer) for name, optimizer in self.optimizers.items()},
        }

    def capture_rest(self) -> dict[str, Any]:
        """Return the protected state that is not sharded and belongs to no single rank, such as that of schedulers."""
        return {
            name: _without_dtensors(thing.state_dict())
            for name, thing in self._protected.things.items()
            if not isinstance(thing, nn.Module | PlainState)
        }

    @torch.no_grad()
    def load(self, shards: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Load what `capture` and `capture_rest` returned on other ranks."""
        for name, values in shards[PARAMETERS].items():
            local(self.parameters[name]).copy_(values)
        states = dict(rest)
        for name, moments in shards[MOMENTS].items():
            parameters = trained_by(self.optimizers[name])
            for number, values in moments.items():
                state = states[name]["state"].setdefault(number, {})
                state.update({key: like(parameters[number], value) for key, value in values.items()})
        self._protected.restore_some(states)


class Shadow:
    """A copy of the previous rank's shards, with optimizers that make the previous rank's steps."""

    def __init__(self, own: OwnShards, state: Mapping[str, Any]) -> None:
        self._own = own
        device = next((local(value).device for value in own.parameters.values()), torch.device("cpu"))
        self._parameters = {
            name: nn.Parameter(values.to(device, copy=True), requires_grad=own.parameters[name].requires_grad)
            for name, values in state[PARAMETERS].items()
        }
        names = {id(parameter): name for name, parameter in own.parameters.items()}
        self._optimizers = {
            name: self._mirror(optimizer, names, state[MOMENTS][name], device)
            for name, optimizer in own.optimizers.items()
        }

    def _mirror(
        self, optimizer: Optimizer, names: Mapping[int, str], moments: Mapping[int, Any], device: torch.device
    ) -> Optimizer:
        mirror = copy.copy(optimizer)
        mirror.state = defaultdict(dict)
        mirror.param_groups = [
            {**group, "params": [self._parameters[names[id(parameter)]] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        for number, (parameter, mirrored) in enumerate(zip(trained_by(optimizer), trained_by(mirror), strict=True)):
            scalars = {key: copy.deepcopy(value) for key, value in optimizer.state.get(parameter, {}).items()
                       if not _is_moment(value)}  # fmt: skip
            sharded = {key: value.to(device, copy=True) for key, value in moments.get(number, {}).items()}
            if scalars or sharded:
                mirror.state[mirrored].update({**scalars, **sharded})
        return mirror

    def capture(self) -> dict[str, Any]:
        """Return the values of the copied shards and of their optimizer states, without copying them."""
        return {
            PARAMETERS: {name: value.detach() for name, value in self._parameters.items()},
            MOMENTS: {name: _moments(trained_by(mirror), mirror) for name, mirror in self._optimizers.items()},
        }

    @property
    def nbytes(self) -> int:
        """The memory of the copy: parameters, and moments as far as they exist."""
        tensors = [*self._parameters.values()]
        for mirror in self._optimizers.values():
            tensors += [value for state in mirror.state.values() for value in state.values() if _is_moment(value)]
        return sum(tensor.nbytes for tensor in tensors)

    def exchange(self, name: str) -> "GradientExchange":
        """Return the exchange of gradients that precedes a step of the optimizer `name`."""
        return GradientExchange(trained_by(self._own.optimizers[name]), trained_by(self._optimizers[name]))

    def step(self, name: str) -> None:
        """Make the step of the optimizer `name` on the copy, with the gradients that the exchange has set."""
        optimizer, mirror = self._own.optimizers[name], self._optimizers[name]
        for group, copied in zip(optimizer.param_groups, mirror.param_groups, strict=True):
            copied.update({key: value for key, value in group.items() if key != "params"})
        for attribute in _SCALER_INPUTS:
            if hasattr(optimizer, attribute):
                setattr(mirror, attribute, getattr(optimizer, attribute))
        type(mirror).step.__wrapped__(mirror)  # type: ignore[attr-defined]  # without the hooks, which count own steps
        for parameter in trained_by(mirror):
            parameter.grad = None


class GradientExchange:
    """Each rank sends its final gradients to the next rank. No rank continues before all have received theirs."""

    def __init__(self, own: Sequence[Any], mirrored: Sequence[nn.Parameter]) -> None:
        pairs = [(parameter, copied) for parameter, copied in zip(own, mirrored, strict=True)
                 if parameter.grad is not None]  # fmt: skip
        kinds = {local(parameter.grad).dtype for parameter, _ in pairs}
        self._parts = [_of_kind(pairs, kind) for kind in sorted(kinds, key=str)]

    def run(self, link: Link, ring: Ring) -> None:
        works = []
        for outgoing, incoming, _ in self._parts:
            works.append(link.post("send", [outgoing], ring.next, 0))
            works.append(link.post("recv", [incoming], ring.previous, 0))
        try:
            for work in works:
                link.wait(work)
            link.do("allreduce", [torch.zeros(1)])
        except GroupBroken:
            for work in works:  # their buffers are used again
                with suppress(RuntimeError):
                    work.wait()
            raise
        for _, incoming, copies in self._parts:
            _set_gradients(incoming, copies)

    def run_again(self, link: Link, ring: Ring) -> bool:
        raise AssertionError("gradients that were exchanged were used by an optimizer")

    serve: Any = None  # a step in which an optimizer has stepped is never repeated

    def release(self) -> None:
        self._parts = []


def _of_kind(
    pairs: Sequence[tuple[Any, nn.Parameter]], kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[nn.Parameter]]:
    """Return a buffer with this rank's gradients of dtype `kind`, one to receive into, and the copied parameters."""
    chosen = [(local(own.grad), copied) for own, copied in pairs if local(own.grad).dtype == kind]
    outgoing = torch.cat([gradient.detach().reshape(-1) for gradient, _ in chosen]).cpu()
    copies = [copied for _, copied in chosen]
    incoming = torch.empty(sum(copied.numel() for copied in copies), dtype=kind)
    return outgoing, incoming, copies


def _set_gradients(incoming: torch.Tensor, copies: Sequence[nn.Parameter]) -> None:
    values = incoming.to(copies[0].device)
    for copied, gradient in zip(copies, values.split([copied.numel() for copied in copies]), strict=True):
        copied.grad = gradient.view_as(copied)


def trained_by(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, in the order in which its state_dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _moments(parameters: Sequence[Any], optimizer: Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    return {
        number: {key: local(value).detach() for key, value in optimizer.state[parameter].items() if _is_moment(value)}
        for number, parameter in enumerate(parameters)
        if parameter in optimizer.state
    }


def _is_moment(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _without_dtensors(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _without_dtensors(value) for key, value in state.items() if not is_dtensor(value)}
    return state


def neighbours(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of (giver, taker) in which every rank gives to the next rank once, and no rank does both at once."""
    for colour in range(3):
        yield [(rank, (rank + 1) % size) for rank in range(size) if _colour(rank, size) == colour]


def _colour(rank: int, size: int) -> int:
    return 2 if size % 2 and rank == size - 1 else rank % 2
