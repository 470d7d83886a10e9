"""A digest of every bit of many tensors. Of tensors in host memory it is XXH3, which reads them once.

On another device, it is computed there with few integer operations. The bits of a tensor are read as 64-bit integers. The upper half of each is mixed into the lower half, then it is
multiplied by an odd number that depends on its position, and the products are summed modulo 2^64. All these operations
can be inverted, so if one integer changes, the sum changes. Integer sums do not depend on the order of their terms, so
all devices of a kind compute the same digest.

A large tensor is read as a matrix. The sums of its rows and the sums of its columns are digested instead: nothing of the
size of the tensor is allocated. If one bit flips, exactly one sum of a row changes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import xxhash

_COLUMNS = 4096
_SMALL = 8 * _COLUMNS  # values of a tensor that is not read as a matrix
_MIX = -7046029254386353131  # an odd number with irregular bits


class WholeDigest:
    """A function that digests tensors where they are: in host memory, or on their device."""

    def __init__(self) -> None:
        self._on_device = DeviceDigest()

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a digest of two 64-bit integers for each of `tensors`, on the device of the first of them."""
        in_memory = not tensors or tensors[0].device.type == "cpu"
        return digest_in_memory(tensors) if in_memory else self._on_device(tensors)


def digest_in_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a digest of two 64-bit integers for each of `tensors`, computed by the processor."""
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for tensor in tensors]
    digests = b"".join(xxhash.xxh3_128_digest(octets.data) for octets in flat)
    return torch.from_numpy(np.frombuffer(digests, np.int64).reshape(-1, 2).copy())


class DeviceDigest:
    """A function that digests tensors with operations of torch. It keeps what depends only on their sizes."""

    def __init__(self) -> None:
        self._layout: tuple[list[int], ...] = ()
        self._multipliers = self._ends = self._places = torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a digest of two 64-bit integers for each of `tensors`, on the device of the first of them."""
        if not tensors:
            return torch.empty(0, 2, dtype=torch.int64)
        device = tensors[0].device
        segments: list[list[torch.Tensor]] = []  # integers that are summed together
        places: list[int] = []  # of the two segments of each tensor
        for tensor in tensors:
            segments += _segments(tensor.detach(), device)
            places += [len(segments) - 2, len(segments) - 1] if tensor.numel() > _SMALL else [len(segments) - 1] * 2
        layout = [sum(words.numel() for words in segment) for segment in segments], places
        if layout != self._layout:
            self._layout = layout
            self._prepare(*layout, device)
        return self._sums(segments)[self._places].view(-1, 2)

    def _prepare(self, sizes: Sequence[int], places: Sequence[int], device: torch.device) -> None:
        factors = (torch.arange(max(sizes), device=device) * _MIX) | 1
        self._multipliers = torch.cat([factors[:size] for size in sizes])
        self._ends = torch.tensor(sizes, device=device).cumsum(0) - 1
        self._places = torch.tensor(places, device=device)

    def _sums(self, segments: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the sum of each segment, in a few operations for all of them together."""
        words = torch.cat([words for segment in segments for words in segment])
        mixed = words ^ ((words >> 32) & 0xFFFFFFFF)
        totals = (mixed * self._multipliers).cumsum(0)[self._ends]
        return torch.diff(totals, prepend=totals.new_zeros(1))


def _segments(tensor: torch.Tensor, device: torch.device) -> list[list[torch.Tensor]]:
    """Return the bits of a tensor as integers: in one segment, or as sums of rows and of columns if it is large."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.contiguous().view(-1)  # by index: a copy of the tensor may have other strides
    size, count = values.element_size(), values.numel()
    if (count * size) % 8 or (values.storage_offset() * size) % 8 or not count:
        padded = values.new_zeros(8 * (count * size // 8 + 1) // size)
        padded[:count] = values
        values = padded
    words = values.view(torch.int64)
    if tensor.numel() <= _SMALL:
        return [[words.to(device)]]  # an optimizer's counters may be in host memory
    rows = words.numel() // _COLUMNS
    matrix, rest = words[: rows * _COLUMNS].view(rows, _COLUMNS), words[rows * _COLUMNS :]
    return [[matrix.sum(1).to(device), rest.to(device)], [matrix.sum(0).to(device)]]


@torch.no_grad()
def are_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of one number: 1 if all values of the floating-point `tensors` are finite, otherwise 0."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return torch.ones((), dtype=torch.int64)
    if any(tensor.is_cuda for tensor in floats):
        return torch.nn.utils.get_total_norm(floats, math.inf).isfinite().long()
    # On a CPU, the norm takes eight times as long.
    extremes = [extreme.double() for tensor in floats for extreme in torch.aminmax(tensor)]
    return torch.stack(extremes).isfinite().all().long()


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
