"""Copying a state into an image: at once where it is in host memory, on its way where it is on a device."""

from contextlib import suppress

import numpy as np
import torch

from holdfast.blocks import Array, State
from holdfast.checkpoint import payload
from holdfast.checkpoint.buffers import Image
from holdfast.checkpoint.device import Departure, Sender, pin
from holdfast.checkpoint.payload import Layout
from holdfast.errors import BadInput


class Capture:
    """Remembers the layout of the last state and what its devices need, since the next state is mostly the same."""

    def __init__(self) -> None:
        self._form: tuple[object, ...] = ()
        self._layout = payload.layout({})
        self._senders: dict[torch.device, Sender] = {}

    def layout(self, tensors: State) -> Layout:
        """How the file of these tensors is laid out: the same object as before for the same names and kinds."""
        form = tuple((name, *_form(value)) for name, value in tensors.items())
        if form != self._form:
            self._form, self._layout = form, payload.layout(tensors)
        return self._layout

    def fill(self, image: Image, layout: Layout, tensors: State) -> list[Departure]:
        """Copy every value to its place; when this returns training may go on and change the tensors."""
        views = image.lay_out(layout)
        devices: dict[torch.device, dict[str, torch.Tensor]] = {}
        with torch.no_grad():
            for name, value in tensors.items():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    devices.setdefault(value.device, {})[name] = value
                else:
                    _copy(views[name], value)
            return [self._sender(device).send(theirs, layout, image) for device, theirs in devices.items()]

    def _sender(self, device: torch.device) -> Sender:
        if device not in self._senders:
            self._senders[device] = Sender(device)
        return self._senders[device]


def device_of(tensors: State) -> torch.device | None:
    """A CUDA device that some of these tensors are on, if any are."""
    devices = (value.device for value in tensors.values() if isinstance(value, torch.Tensor) and value.is_cuda)
    return next(devices, None)


def make_ready(image: Image, layout: Layout, device: torch.device | None) -> None:
    """Do what would else take most of the time of the first save into a new image."""
    image.touch()
    image.lay_out(layout)
    if device is not None:
        with suppress(BadInput), torch.cuda.device(device):  # a save that cannot pin it either says so
            pin(image)


def _form(value: Array) -> tuple[object, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.layout
    return type(value), getattr(value, "dtype", None), getattr(value, "shape", None)


def _copy(target: Array, source: Array) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(torch.as_tensor(source))
    else:
        np.copyto(target, source)
