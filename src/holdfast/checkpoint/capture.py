"""Copy a state into an image: at once from host memory, asynchronously from a device.

Host memory is copied by several threads, because training waits for it; two cores copy nearly twice as fast as one.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import torch

from holdfast.blocks.division import Array, State
from holdfast.checkpoint import payload
from holdfast.checkpoint.buffers import Image
from holdfast.checkpoint.device import Departure, Sender, pin
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.errors import BadInput

PIECE = 4 << 20  # bytes that a thread copies at a time; a smaller state is copied by one thread
THREADS = 4  # more are limited by the memory bandwidth

Piece: TypeAlias = tuple[Array, Array]
"""Some values of an image, and those that they are to have."""


class Capture:
    """Copies states, and keeps the layout and the devices of the last one, because the next state is usually alike."""

    def __init__(self) -> None:
        self._form: tuple[object, ...] = ()
        self._layout = payload.layout({})
        self._senders: dict[torch.device, Sender] = {}
        self._threads = _usable_cores()
        self._helpers = ThreadPoolExecutor(THREADS, "holdfast-copy")  # starts a thread when it is first needed

    def layout(self, tensors: State) -> PayloadLayout:
        """Return the layout of these tensors; the same object as before for the same names, dtypes and shapes."""
        form = tuple((name, *_form(value)) for name, value in tensors.items())
        if form != self._form:
            self._form, self._layout = form, payload.layout(tensors)
        return self._layout

    def fill(self, image: Image, layout: PayloadLayout, tensors: State) -> list[Departure]:
        """Copy every value into the image; training may change the tensors when this returns."""
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
            return [self._sender(device).send(on_device, layout, image) for device, on_device in devices.items()]

    def close(self) -> None:
        """End the threads."""
        self._helpers.shutdown()

    def _copy(self, pieces: list[Piece]) -> None:
        """Copy all pieces, with helper threads if there are many bytes."""
        left = iter(pieces)  # shared by all threads
        helpers = min(self._threads, sum(target.nbytes for target, _ in pieces) // PIECE) - 1
        helped = [self._helpers.submit(_copy_each, left) for _ in range(helpers)]
        try:
            _copy_each(left)
        finally:
            for future in helped:
                future.result()

    def _sender(self, device: torch.device) -> Sender:
        if device not in self._senders:
            self._senders[device] = Sender(device)
        return self._senders[device]


def device_of(tensors: State) -> torch.device | None:
    """Return a CUDA device that holds some of these tensors, or None."""
    devices = (value.device for value in tensors.values() if isinstance(value, torch.Tensor) and value.is_cuda)
    return next(devices, None)


def make_ready(image: Image, layout: PayloadLayout, device: torch.device | None) -> None:
    """Do the work that would take most of the time of the first save into a new image."""
    image.touch()
    image.lay_out(layout)
    if device is not None:
        with suppress(BadInput), torch.cuda.device(device):  # the save itself reports memory that cannot be pinned
            pin(image)


def _form(value: Array) -> tuple[object, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.layout
    return type(value), getattr(value, "dtype", None), getattr(value, "shape", None)


def _pieces(target: Array, source: Array) -> Iterator[Piece]:
    """Yield (target, source) pairs to copy; a large contiguous value is split."""
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


def _usable_cores() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
