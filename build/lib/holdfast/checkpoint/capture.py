"""Copy a training state into an image: reusable host memory with the exact bytes of a snapshot's tensor file.

Tensors in host memory are copied before the call returns, by several threads, because training waits. Tensors on a CUDA
device are copied asynchronously.
"""

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import torch

from holdfast.blocks.division import Array, State
from holdfast.checkpoint import payload
from holdfast.checkpoint.device import DeviceCopy, Sender, pin
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.errors import BadInput

PIECE = 4 << 20  # bytes that a thread copies at a time; a smaller state is copied by one thread
THREADS = 4  # more are limited by the memory bandwidth

Piece: TypeAlias = tuple[Array, Array]
"""A view of some values in an image, and the values to copy into it."""


class HostImage:
    """A page-aligned buffer in host memory for the tensor file of one snapshot."""

    def __init__(self, capacity: int) -> None:
        memory = mmap.mmap(-1, max(1, capacity), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if sys.platform == "linux":
            memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults when it is filled for the first time
            memory.madvise(mmap.MADV_DONTFORK)  # otherwise a fork of a data loader makes the next write copy every page
        self.bytes = np.frombuffer(memory, np.uint8)
        self.pinned = False
        self._layout: PayloadLayout | None = None
        self._views: dict[str, Array] = {}

    @property
    def capacity(self) -> int:
        return len(self.bytes)

    def lay_out(self, layout: PayloadLayout) -> dict[str, Array]:
        """Write the header of `layout` into the buffer, and return a view of the buffer for each tensor, by name."""
        if layout is not self._layout:
            self.bytes[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
            self._views = payload.decode(self.bytes[: layout.file_length], "image")
            self._layout = layout
        return self._views


class BufferPool:
    """A thread-safe pool of at most `most` host buffers; each of them holds one state while it is saved."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise BadInput(f"the number of saves in flight must be 1 or more (got {most}).")
        self._most = most
        self._free: list[HostImage] = []
        self._made: list[HostImage] = []
        self._changed = threading.Condition()

    @property
    def bytes(self) -> int:
        return sum(image.capacity for image in self._made)

    def take(self, size: int) -> HostImage:
        """Return a buffer of at least `size` bytes for exclusive use; wait if all `most` buffers are in use."""
        with self._changed:
            while True:
                for image in self._free:
                    if image.capacity >= size:
                        self._free.remove(image)
                        return image
                if self._free and len(self._made) == self._most:
                    self._made.remove(self._free.pop())  # too small, and it counts towards the limit
                if len(self._made) < self._most:
                    self._made.append(image := HostImage(size))
                    return image
                self._changed.wait()

    def reserve(self, size: int, count: int) -> list[HostImage]:
        """Add buffers of `size` bytes until the pool has `count` buffers, and return the added buffers.

        They count as in use until they are given back. Free buffers smaller than `size` are removed first."""
        with self._changed:
            for image in [image for image in self._free if image.capacity < size]:
                self._free.remove(image)
                self._made.remove(image)
            reserved: list[HostImage] = []
            while len(self._made) < min(count, self._most):
                reserved.append(HostImage(size))
                self._made.append(reserved[-1])
            return reserved

    def give_back(self, image: HostImage) -> None:
        with self._changed:
            self._free.append(image)
            self._changed.notify()

    def clear(self) -> None:
        """Free all buffers of the pool. None of them may be in use."""
        self._free.clear()
        self._made.clear()


class StateCapture:
    """A copier of training states from CPU and GPU tensors into host buffers."""

    def __init__(self) -> None:
        self._form: tuple[object, ...] = ()
        self._layout = payload.layout({})
        self._senders: dict[torch.device, Sender] = {}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(THREADS, cores)
        self.helpers = ThreadPoolExecutor(THREADS, "holdfast-copy")  # starts a thread when it is first needed

    def layout(self, tensors: State) -> PayloadLayout:
        """Return the file layout of `tensors`; reuse the last one if no name, dtype, shape or device has changed."""
        form = tuple(
            (name, type(value), *(getattr(value, key, None) for key in ("dtype", "shape", "device", "layout")))
            for name, value in tensors.items()
        )
        if form != self._form:
            self._form, self._layout = form, payload.layout(tensors, digests=True)
        return self._layout

    def fill(self, image: HostImage, layout: PayloadLayout, tensors: State) -> list[DeviceCopy]:
        """Copy `tensors` into the host buffer `image`, and return the GPU copies that are still in progress.

        The caller may change the tensors as soon as this method returns."""
        views = image.lay_out(layout)
        devices: dict[torch.device, dict[str, torch.Tensor]] = {}
        here: list[Piece] = []
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                devices.setdefault(value.device, {})[name] = value
            else:
                here += _pieces(views[name], value)
        self._copy(here)
        with torch.no_grad():
            for device in devices.keys() - self._senders.keys():
                self._senders[device] = Sender(device)
            return [self._senders[device].send(values, layout, image) for device, values in devices.items()]

    def _copy(self, pieces: list[Piece]) -> None:
        left = iter(pieces)  # shared by all threads
        helpers = min(self._threads, sum(target.nbytes for target, _ in pieces) // PIECE) - 1
        helped = [self.helpers.submit(_copy_each, left) for _ in range(helpers)]
        try:
            _copy_each(left)
        finally:
            for future in helped:
                future.result()


def device_of(tensors: State) -> torch.device | None:
    """Return the CUDA device of the first tensor that is on a GPU, or None if all tensors are in host memory."""
    devices = (value.device for value in tensors.values() if isinstance(value, torch.Tensor) and value.is_cuda)
    return next(devices, None)


def make_ready(image: HostImage, layout: PayloadLayout, device: torch.device | None) -> None:
    """Allocate all memory pages of the buffer `image`, write the file header into it, and pin it if `device` is set."""
    image.bytes[:: mmap.PAGESIZE] = 0  # allocates all pages now, instead of one by one while it is filled
    image.lay_out(layout)
    if device is not None:
        with suppress(BadInput), torch.cuda.device(device):  # the save itself reports memory that cannot be pinned
            pin(image)


def _pieces(target: Array, source: Array) -> Iterator[Piece]:
    """Yield (target, source) pairs to copy; a large contiguous tensor is split into pieces of `PIECE` bytes."""
    if not isinstance(target, torch.Tensor):
        yield target, source
        return
    values = torch.as_tensor(source).detach()
    if target.nbytes <= PIECE or not (values.is_contiguous() and values.dtype == target.dtype):
        yield target, values
        return
    step = PIECE // target.element_size()
    yield from zip(target.view(-1).split(step), values.view(-1).split(step), strict=True)


def _copy_each(pieces: Iterator[Piece]) -> None:
    for target, source in pieces:
        if isinstance(target, torch.Tensor):
            target.copy_(torch.as_tensor(source))
        else:
            np.copyto(target, source)
