"""A cheap fingerprint of the state at every boundary: a few values of every part of the protected models, digested.

A step that is trained again after a failure must come out with the same fingerprint; one that does not has read
something that was not saved. On a device the values leave beside the training and are looked at later, so that nothing
waits for them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import xxhash

from holdfast.train.state.protected import Protected

PARTS = 48  # tensors that are looked at, spread over those there are
VALUES = 8  # of each, spread over it


Copy: TypeAlias = tuple[bytes, list[torch.Tensor]]  # of what is in host memory, and of what is on its way to it


class Sample:
    """Values on their way to a fingerprint."""

    def __init__(self, copies: Sequence[Copy], arrived: torch.cuda.Event | None) -> None:
        self._copies, self._arrived = copies, arrived

    @property
    def is_there(self) -> bool:
        """Whether the fingerprint can be told without waiting."""
        return self._arrived is None or self._arrived.query()

    def digest(self) -> str:
        """32 hexadecimal digits: 16 of the parameters, which all ranks share, and 16 of the buffers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return "".join([_digest(*copy) for copy in self._copies])


class Fingerprints:
    """Takes samples of what is protected: of its models, or where there is none, of its whole state."""

    def __init__(self, protected: Protected | None) -> None:
        models = protected.models if protected else []
        self._whole = protected if protected and not models else None
        parameters = [each for model in models for each in model.parameters()]
        buffers = [each for model in models for each in model.buffers()]
        self._parts = (_Part(parameters), _Part(buffers))
        self._devices = {part.device for part in (*parameters, *buffers) if part.is_cuda}

    def take(self) -> Sample:
        """The values as they are once all that is queued by now is done."""
        if self._whole is not None:
            # State that is not a model is the user's own, mostly small, and nobody knows what of it changes.
            return Sample([(self._whole.digest().encode(), []), (b"", [])], None)
        copies = [part.copy() for part in self._parts]
        return Sample(copies, _recorded(self._devices) if self._devices else None)


class _Part:
    """Some tensors, and the places in them that are looked at."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensors[i] for i in _spread(len(tensors), PARTS) if tensors[i].numel()]
        self._places: list[int] = []
        self._pointers = [tensor.data_ptr for tensor in self._tensors]
        self._here: list[memoryview] = []
        self._there: list[list[torch.Tensor]] = []

    def copy(self) -> Copy:
        """The values that are looked at, copied; on their way to the host where they were on a device."""
        if not self._pointers:
            return b"", []
        places = [place() for place in self._pointers]
        if places != self._places:  # memory was exchanged, as by `model.half()` or an average of weights swapped in
            self._places = places
            self._look()
        # By Python's own means: at the end of a step the code of numpy and torch has long left the processor's caches.
        here = b"".join(map(memoryview.tobytes, self._here))
        return here, [_to_host(torch.cat(views)) for views in self._there]

    def _look(self) -> None:
        kinds: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for tensor in self._tensors:
            kinds[tensor.dtype, tensor.device].append(_few(tensor))  # those of one kind are copied at once
        self._there = [views for views in kinds.values() if views[0].is_cuda]
        here = (views for views in kinds.values() if not views[0].is_cuda)
        self._here = [view.numpy().data for views in here for view in views]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A few values of a tensor, as whole numbers of the same bits, in its own memory."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    count = min(VALUES, values.numel())
    # By memory, not by index: any dense tensor has this many values so far apart, whatever its strides.
    return values.as_strided((count,), (values.numel() // count,)).view(_BITS[values.element_size()])


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _spread(count: int, most: int) -> list[int]:
    """At most so many of 0..count-1, evenly spread, the first and the last among them."""
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
