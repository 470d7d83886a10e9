"""Copy tensors from a CUDA device: first to a clone on the device, then to the host while training continues."""

import logging
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from holdfast.checkpoint.payload import PayloadLayout
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from holdfast.checkpoint.capture import HostImage

logger = logging.getLogger(__name__)

SPARE = 0.05  # share of the device's memory that must stay free besides a clone
_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCopy:
    """An asynchronous copy of tensors from a GPU to host memory, tracked with CUDA events."""

    started: torch.cuda.Event
    captured: torch.cuda.Event
    arrived: torch.cuda.Event

    def wait(self) -> float:
        """Wait until all bytes are in host memory, and return how many seconds the copy delayed training."""
        self.arrived.synchronize()
        return float(self.started.elapsed_time(self.captured)) / 1000


@dataclass(frozen=True, slots=True)
class ByteRun:
    """A range of bytes in the tensor file, from `start` to `end`; `at` is its offset in the buffer on the GPU."""

    start: int
    end: int
    at: int


class Sender:
    """A copier of tensors from one GPU to host memory, through a buffer on the GPU.

    The buffer is kept between saves, so that training cannot take its memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._layout: PayloadLayout | None = None
        self._clone: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._runs: list[ByteRun] = []
        self._arrived: torch.cuda.Event | None = None

    def send(self, tensors: Mapping[str, torch.Tensor], layout: PayloadLayout, image: "HostImage") -> DeviceCopy:
        """Start to copy `tensors` into the host buffer `image`; kernels launched afterwards may change the tensors."""
        views = image.lay_out(layout)
        pin(image)
        if layout is not self._layout:
            self._prepare(tensors, layout)
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            started = torch.cuda.Event(enable_timing=True)
            captured = torch.cuda.Event(enable_timing=True)
            arrived = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, and leaves the CPU to training
        started.record(compute)
        if self._clone is None:
            for name, tensor in tensors.items():
                torch.as_tensor(views[name]).copy_(tensor, non_blocking=True)
            captured.record(compute)
            arrived.record(compute)
        else:
            if self._arrived is not None:
                compute.wait_event(self._arrived)  # the clone of the previous save must be sent first
            _copy(self._views, [tensors[name] for name in _in_file(tensors, layout)])
            captured.record(compute)
            self._side.wait_event(captured)
            host = torch.from_numpy(image.bytes)
            with torch.cuda.stream(self._side):
                for run in self._runs:
                    part = self._clone[run.at : run.at + run.end - run.start]
                    host[run.start : run.end].copy_(part, non_blocking=True)
            arrived.record(self._side)
        self._arrived = arrived
        return DeviceCopy(started, captured, arrived)

    def _prepare(self, tensors: Mapping[str, torch.Tensor], layout: PayloadLayout) -> None:
        """Allocate a buffer on the GPU for copies of all `tensors`, unless too little memory is free."""
        if self._arrived is not None:
            self._arrived.synchronize()  # the side stream still reads the old clone
        self._clone, self._views, self._layout = None, [], layout
        names = _in_file(tensors, layout)
        self._runs, places, size = _packed([layout.spans[name] for name in names])
        free, total = torch.cuda.mem_get_info(self._device)
        if free - size < SPARE * total:
            text = "%s has %d bytes free, too few to clone %d: training waits while they are copied to the host"
            logger.warning(text, self._device, free, size)
            return
        self._clone = torch.empty(size, dtype=torch.uint8, device=self._device)
        for name, at in zip(names, places, strict=True):
            like = tensors[name]
            self._views.append(self._clone[at : at + like.nbytes].view(like.dtype).view(like.shape))


def pin(image: "HostImage") -> None:
    if image.pinned:
        return
    # Registered instead of allocated by torch, whose allocator rounds up to a power of two.
    runtime, address = torch.cuda.cudart(), image.bytes.ctypes.data
    if int(runtime.cudaHostRegister(address, image.capacity, _PORTABLE)) != 0:
        raise BadInput(
            f"{image.capacity} bytes of host memory cannot be pinned for a copy from the device: "
            "allow fewer saves in flight, or use the blocking writer."
        )
    weakref.finalize(image, runtime.cudaHostUnregister, address)
    image.pinned = True


def _in_file(tensors: Mapping[str, torch.Tensor], layout: PayloadLayout) -> list[str]:
    return [name for name in layout.spans if name in tensors and tensors[name].numel()]


def _packed(spans: Sequence[tuple[int, int]]) -> tuple[list[ByteRun], list[int], int]:
    """Plan a GPU buffer that holds the file ranges `spans` one after another.

    Return the contiguous runs of bytes, the offset of each range in the buffer, and the size of the buffer."""
    runs: list[ByteRun] = []
    places: list[int] = []
    size = 0
    for start, end in spans:
        if not runs or runs[-1].end != start:
            size = -(-size // _ALIGNMENT) * _ALIGNMENT + start % _ALIGNMENT  # aligned as in the file: copies are faster
            runs.append(ByteRun(start, end, size))
        else:
            runs[-1] = replace(runs[-1], end=end)
        places.append(size)
        size += end - start
    return runs, places, size


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    kinds: defaultdict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        kinds[source.dtype][0].append(target)
        kinds[source.dtype][1].append(source)
    for kind, (to, of) in kinds.items():
        if kind.is_floating_point and kind.itemsize > 1:
            torch._foreach_copy_(to, of)
        else:  # dtypes that _foreach_copy_ may not support
            for target, source in zip(to, of, strict=True):
                target.copy_(source)
