"""Copies of the previous rank's weights, kept from the all-gathers of forward, without more traffic or optimizer steps.

Every forward gathers all parameters on all ranks. From each all-gather this rank keeps the part that the previous rank
contributed, on the same device and in the gathered dtype. If the previous rank is lost, these are its newest weights:
those with which the last forward began. Modules that forward has not reached in the present step have the weights of
the step before.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.checkpoint import sharding
from holdfast.live.sharded.collectives import Collectives
from holdfast.live.sharded.mesh_group import ModuleGather
from holdfast.live.sharded.operations import Ring
from holdfast.train.state.shards import held_box, local


@dataclass(slots=True, eq=False)
class GatheredCopy:
    """A copy of the previous rank's contribution to the all-gather of some `parameters`, which are gathered together."""

    parameters: Sequence[Any]
    ring: Ring
    values: torch.Tensor | None = None
    step: int = -1  # in which they were gathered
    _moment: tuple[int, int] = (-1, -1)

    def keep(self, gathered: torch.Tensor, own: torch.Tensor, step: int, optimizer_steps: int) -> None:
        """Copy the previous rank's part of `gathered`, to which this rank has contributed `own`, unless it did before.

        Between two optimizer steps, all gathers of the parameters have the same values."""
        if self.is_of(step, optimizer_steps) or (self.values is None and not self._is_contribution(own)):
            return
        part = gathered.detach().view(self.ring.size, -1)[self.ring.previous]
        if self.values is None or self.values.dtype != part.dtype:
            self.values = part.clone()
        else:
            self.values.copy_(part)
        self.step, self._moment = step, (step, optimizer_steps)

    def is_of(self, step: int, optimizer_steps: int) -> bool:
        """Return True if the copy is of `step`, after this number of `optimizer_steps` in it."""
        return self._moment == (step, optimizer_steps)

    def rows(self) -> Iterable[tuple[Any, torch.Tensor]]:
        """Yield each parameter with the previous rank's rows of it."""
        if self.values is None:
            return
        shapes = [sharding.sizes(held_box(parameter, self.ring.previous)) for parameter in self.parameters]
        pieces = split_contribution(self.values, self._padded, shapes)
        yield from zip(self.parameters, pieces, strict=True)

    @property
    def _padded(self) -> list[int]:
        return [math.prod(sharding.sizes(held_box(parameter, 0))) for parameter in self.parameters]

    def _is_contribution(self, own: torch.Tensor) -> bool:
        """Return True if `own` consists of this rank's shards. A quantized or custom all-gather gathers other values."""
        if own.numel() != sum(self._padded):
            return False
        shards = [local(parameter.detach()) for parameter in self.parameters]
        pieces = split_contribution(own, self._padded, [tuple(shard.shape) for shard in shards])
        return all(torch.equal(piece, shard.to(own.dtype)) for piece, shard in zip(pieces, shards, strict=True))


def split_contribution(
    values: torch.Tensor, padded: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return the shards, of `shapes`, in a rank's contribution to an all-gather; each takes `padded` values in it."""
    pieces = values.split(list(padded))
    return [piece[: math.prod(shape)].view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@dataclass(slots=True, eq=False)
class GatheredCopies:
    """The copies that this rank keeps of the previous rank's weights: one for each FSDP module."""

    collectives: Collectives
    step: Callable[[], int]  # returns the step that this rank trains
    copies: list[GatheredCopy] = field(default_factory=list)

    def watch(self, number: int, module: Any) -> None:
        """Keep a copy of the previous rank's part from the all-gathers of an FSDP module, which has this number."""
        self.copies.append(GatheredCopy(gathered_parameters(module), self.collectives.ring))
        module.set_custom_all_gather(_KeptGather(self, number))

    @property
    def nbytes(self) -> int:
        return sum(copy.values.nbytes for copy in self.copies if copy.values is not None)

    def rows(self) -> dict[int, tuple[torch.Tensor, int]]:
        """Return the copied rows by the `id` of their parameter, with the step in which they were gathered."""
        self.collectives.catch_up()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # FSDP gathers in a stream of its own
        return {id(parameter): (rows, copy.step) for copy in self.copies for parameter, rows in copy.rows()}


class _KeptGather(ModuleGather):
    def __init__(self, copies: GatheredCopies, number: int) -> None:
        super().__init__(copies.collectives, number)
        self._copies, self._number = copies, number

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> None:
        super().__call__(output_tensor, input_tensor, group, async_op)
        copy, moment = self._copies.copies[self._number], (self._copies.step(), self._collectives.optimizer_steps)
        if not copy.is_of(*moment):
            self._collectives.later(lambda: copy.keep(output_tensor, input_tensor, *moment))


def gathered_parameters(module: Any) -> list[Any]:
    """Return the sharded parameters that FSDP gathers for `module`, in the order in which it joins them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # its name in older versions
    return [parameter.sharded_param for group in groups if group for parameter in group.fsdp_params]
