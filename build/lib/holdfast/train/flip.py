"""The fault `flip`: one bit of a weight or of an optimizer moment changes on one rank, as in damaged memory.

The tensor, the value in it and, unless it is given, the bit follow from the step and the rank, so the same flip happens
again in every run with the same model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.errors import BadInput
from holdfast.faults import points
from holdfast.faults.schedule import Failure
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import local

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class BitFlip:
    """A bit of the value at `index` of a tensor, which has the name `name` in the protected state."""

    name: str
    tensor: torch.Tensor
    index: int
    bit: int

    def __str__(self) -> str:
        return f"{self.name}[{self.index}] bit {self.bit}"

    @torch.no_grad()
    def apply(self) -> None:
        """Flip the bit."""
        width = 8 * self.tensor.element_size()
        mask = (1 << self.bit) - ((1 << width) if self.bit == width - 1 else 0)  # the sign bit is negative
        # By memory, not by index: that works for any dense tensor, whatever its strides.
        memory = self.tensor.detach().as_strided((self.tensor.numel(),), (1,))
        memory.view(_INTEGERS[self.tensor.element_size()])[self.index].bitwise_xor_(mask)


def choose_flip(protected: Protected, failure: Failure, rank: int) -> BitFlip:
    """Return the bit that `failure` flips on `rank`; raise BadInput if the state has no such value or bit."""
    what, bit = points.flipped(failure)
    tensors = {name: value for name, value in _candidates(protected, what).items() if value.numel() > 1}
    if not tensors:
        raise BadInput(f"flip cannot strike a {what} in step {failure.step}: rank {rank} protects no {what} there.")
    random = np.random.default_rng((failure.step, rank))
    ends = np.cumsum([value.numel() for value in tensors.values()])
    place = int(random.integers(ends[-1]))
    number = int(np.searchsorted(ends, place, side="right"))
    name, value = list(tensors.items())[number]
    width = 8 * value.element_size()
    bit = int(random.integers(width)) if bit is None else bit
    if bit >= width:
        raise BadInput(f"flip cannot strike bit {bit}: {name} has values of {width} bits, 0 to {width - 1}.")
    return BitFlip(name, value, place - int(ends[number]) + value.numel(), bit)


def _candidates(protected: Protected, what: str) -> Mapping[str, torch.Tensor]:
    """Return the weights, or the moments, that this rank holds and that an optimizer trains, by name."""
    names = {
        id(parameter): f"{model}/{name}"
        for model, thing in protected.things.items()
        if isinstance(thing, torch.nn.Module)
        for name, parameter in thing.named_parameters()
    }
    found: dict[str, torch.Tensor] = {}
    for optimizer in protected.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "a parameter")
                state = optimizer.state.get(parameter, {}) if what == points.MOMENT else {"": parameter}
                for key in sorted(state):
                    if isinstance(state[key], torch.Tensor) and state[key].is_floating_point():
                        found[f"{key} of {name}" if key else name] = local(state[key].detach())
    return found
