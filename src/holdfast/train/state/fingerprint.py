"""A cheap fingerprint of the state at every boundary: a digest of a few values of the protected models' tensors.

A step that is trained again after a failure must end with the same fingerprint; otherwise it has read something that was
not saved. Values on a GPU are copied asynchronously and digested later, so training does not wait for them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import xxhash

from holdfast.train.state.protected import Protected

PARTS = 48  # tensors that are sampled, spread over all of them
VALUES = 8  # of each, spread over it
Copy: TypeAlias = tuple[bytes, list[torch.Tensor]]  # values from host memory, and values on their way from a device


class Sample:
    """The sampled values of one boundary."""

    def __init__(self, copies: Sequence[Copy], arrived: torch.cuda.Event | None) -> None:
        self._copies, self._arrived = copies, arrived

    @property
    def has_arrived(self) -> bool:
        """True if the values have arrived in host memory."""
        return self._arrived is None or self._arrived.query()

    def digest(self) -> str:
        """Return 32 hexadecimal digits: 16 of the parameters, which all ranks share, and 16 of the buffers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return "".join([_digest(*copy) for copy in self._copies])


class Fingerprints:
    """Samples the protected models or, if there are none, the whole protected state."""

    def __init__(self, protected: Protected | None) -> None:
        models = protected.models if protected else []
        self._whole = protected if protected and not models else None
        parameters = [tensor for model in models for tensor in model.parameters()]
        buffers = [tensor for model in models for tensor in model.buffers()]
        self._parts = (_Part(parameters), _Part(buffers))
        self._devices = {part.device for part in (*parameters, *buffers) if part.is_cuda}

    def take(self) -> Sample:
        """Return the values as they are once all queued work is done."""
        if self._whole is not None:
            # State that is not a model is mostly small, and any part of it may change.
            return Sample([(self._whole.digest().encode(), []), (b"", [])], None)
        copies = [part.copy() for part in self._parts]
        return Sample(copies, _recorded(self._devices) if self._devices else None)


class _Part:
    """Some tensors, and the views of the values that are sampled."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensors[i] for i in _spread(len(tensors), PARTS) if tensors[i].numel()]
        self._places: list[int] = []
        self._pointers = [tensor.data_ptr for tensor in self._tensors]
        self._here: list[memoryview] = []
        self._there: list[list[torch.Tensor]] = []

    def copy(self) -> Copy:
        """Copy the sampled values; from a device, start the copy to the host."""
        if not self._pointers:
            return b"", []
        places = [place() for place in self._pointers]
        if places != self._places:  # tensors have new memory, for example after `model.half()`
            self._places = places
            self._look()
        # Without numpy or torch, whose code has left the CPU caches by the end of a step: saves 11 us (benchmarks/steady).
        here = b"".join(map(memoryview.tobytes, self._here))
        return here, [_to_host(torch.cat(views)) for views in self._there]

    def _look(self) -> None:
        kinds: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for tensor in self._tensors:
            kinds[tensor.dtype, tensor.device].append(_few(tensor))  # tensors of one kind are copied together
        self._there = [views for views in kinds.values() if views[0].is_cuda]
        here = (views for views in kinds.values() if not views[0].is_cuda)
        self._here = [view.numpy().data for views in here for view in views]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few values of a tensor, as integers with the same bits."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    count = min(VALUES, values.numel())
    # By memory, not by index: that works for any dense tensor, whatever its strides.
    return values.as_strided((count,), (values.numel() // count,)).view(_BITS[values.element_size()])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of 0..count-1, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)  # from torch's cache after the first time
    return host.copy_(values, non_blocking=True)


def _recorded(devices: Iterable[torch.device]) -> torch.cuda.Event:
    (device, *_) = devices  # a rank trains on one
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record()
    return event


def _digest(here: bytes, arrived: Sequence[torch.Tensor]) -> str:
    if arrived:
        here += b"".join(copy.numpy().tobytes() for copy in arrived)
    return xxhash.xxh3_64_hexdigest(here) if here else _NOTHING


_NOTHING = xxhash.xxh3_64_hexdigest(b"")
