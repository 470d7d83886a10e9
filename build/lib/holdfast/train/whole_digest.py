"""A digest of every bit of many tensors, computed on their device with a few integer operations per tensor.

The bits of a tensor are read as 64-bit integers. The upper half of each is mixed into the lower half, then it is
multiplied by an odd number that depends on its position, and the products are summed modulo 2^64. All these operations
can be inverted, so if one integer changes, the sum changes. Integer sums do not depend on the order of their terms, so
every device computes the same digest.

A large tensor is read as a matrix. The sums of its rows and the sums of its columns are digested instead: nothing of the
size of the tensor is allocated. If one bit flips, exactly one sum of a row changes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

_COLUMNS = 4096
_SMALL = 4 * _COLUMNS  # values of 8 bytes
_MIX = -7046029254386353131  # an odd number with irregular bits


class WholeDigest:
    """A function that digests tensors. It keeps the multipliers for each device."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a digest of two 64-bit integers for each of `tensors`, as a tensor on their device."""
        if not tensors:
            return torch.empty(0, 2, dtype=torch.int64)
        return torch.stack([part for tensor in tensors for part in self._digest(tensor.detach())]).view(-1, 2)

    def _digest(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        values = values.contiguous().view(-1)  # by index: a copy of the tensor may have other strides
        size, count = values.element_size(), values.numel()
        if (count * size) % 8 or (values.storage_offset() * size) % 8 or not count:
            padded = values.new_zeros(8 * (count * size // 8 + 1) // size)
            padded[:count] = values
            values = padded
        words = values.view(torch.int64)
        if words.numel() <= _SMALL:
            digest = self._sum(words)
            return digest, digest
        rows = words.numel() // _COLUMNS
        matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
        return self._sum(torch.cat([matrix.sum(1), rest])), self._sum(matrix.sum(0))

    def _sum(self, words: torch.Tensor) -> torch.Tensor:
        mixed = words ^ ((words >> 32) & 0xFFFFFFFF)
        return (mixed * self._multipliers(words.numel(), words.device)).sum()

    def _multipliers(self, count: int, device: torch.device) -> torch.Tensor:
        factors = self._factors.get(device)
        if factors is None or factors.numel() < count:
            size = max(_SMALL, 2 * count)
            factors = self._factors[device] = (torch.arange(size, device=device) * _MIX) | 1
        return factors[:count]


def replicated_state(
    parameters: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Return `parameters`, and the optimizer state that belongs to them, by names that are the same on every rank."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    state, counters = dict(parameters), defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]](list)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (name := names.get(id(parameter))) is None:
                    continue
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor) and value.ndim:
                        state[f"{key} of {name}"] = value
                    elif isinstance(value, torch.Tensor):
                        counters[value.device, value.dtype].append(value)
    for (device, dtype), values in counters.items():  # such as Adam's steps: many tensors of one number
        state[f"optimizer counters ({device.type}, {dtype})"] = torch.stack(values)
    return state
