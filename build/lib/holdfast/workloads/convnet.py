"""The forward and backward pass of a small convolutional network, in buffers that are reused for every batch.

The last axis of arrays is the image in the batch, so that every loop runs over contiguous memory. Matrix products are
PyTorch's, which are twice as fast as numpy's on the long thin matrices of a small network. All other steps are loops
compiled by numba, because one pass over memory costs as much as several of these products.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from holdfast.blocks.division import Ids


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a network with two convolutions and three linear layers, for square images of width `side`."""

    side: int
    classes: int
    kernel: int
    stride: int
    channels: tuple[int, int]
    hidden: tuple[int, int]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name, in PyTorch's layout (outputs first)."""
        (first, second), (third, fourth) = self.channels, self.hidden
        pooled = ((self.side - self.kernel) // self.stride + 1) // 2
        weights: dict[str, tuple[int, ...]] = {
            "conv1": (first, 1, self.kernel, self.kernel),
            "conv2": (second, first, 3, 3),
            "full1": (third, second * (pooled // 2) ** 2),
            "full2": (fourth, third),
            "full3": (self.classes, fourth),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, shape in weights.items():
            shapes |= {f"{layer}.weight": shape, f"{layer}.bias": shape[:1]}
        return shapes


Reals: TypeAlias = npt.NDArray[np.float32]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread in this context, which makes results reproducible to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Buffer:
    """The values of all parameters in one contiguous array, with a view for each parameter."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        sizes = [prod(shape) for shape in shapes.values()]
        self.flat = _room(sum(sizes))
        parts = torch.from_numpy(self.flat).split(sizes)
        self.parts = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}

    def fill(self, arrays: Mapping[str, Reals]) -> None:
        for name, part in self.parts.items():
            part.numpy()[...] = arrays[name]

    def copy(self) -> dict[str, Reals]:
        return {name: part.numpy().copy() for name, part in self.parts.items()}


class Convolution:
    """A convolution followed by 2×2 max pooling and ReLU, for batches of one size."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor, side: int, batch: int, *, stride: int = 1, pad: int = 0
    ) -> None:
        channels, inputs, kernel, _ = weight.shape
        pooled = ((side + 2 * pad - kernel) // stride + 1) // 2
        self.shape = (channels, pooled, pooled, batch)
        self._weight, self._bias = weight.flatten(1), bias.numpy()
        self._stride, self._pad = stride, pad
        padded = _room(inputs, side + 2 * pad, side + 2 * pad, batch)
        self._padded, self.input = padded, padded[:, pad : pad + side, pad : pad + side]
        self._patches = _room(inputs, kernel, kernel, 2, 2, pooled, pooled, batch)
        self._sums = _room(channels, 4, pooled * pooled * batch)
        self._patch_rows = torch.from_numpy(self._patches).view(inputs * kernel * kernel, -1)
        self._sum_rows = torch.from_numpy(self._sums).view(channels, -1)
        self.output = _room(channels, pooled * pooled * batch)
        self._winner = np.empty(self.output.shape, np.uint8)

    def forward(self) -> None:
        """Compute `output`, with one row for each channel, from `input`."""
        _unfold(self._padded, self._patches, self._stride)
        torch.mm(self._weight, self._patch_rows, out=self._sum_rows)
        _pool(self._sums, self._bias, self.output, self._winner)

    def backward(self, slope: Reals, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Write the gradients of the weights and biases to the tensors `weight` and `bias`.

        `slope` is the gradient of the output."""
        _unpool(slope, self._winner, self._sums, bias.numpy())
        if len(self._weight) < 16:
            torch.mm(self._sum_rows, self._patch_rows.T, out=weight.flatten(1))
        else:  # the same product the other way round takes two thirds of the time; with few channels, twice the time
            weight.flatten(1).copy_(torch.mm(self._patch_rows, self._sum_rows.T).T)

    def backward_to(self, slope: Reals) -> None:
        """Write the gradient of `input` to `slope`. Call this after `backward`, whose data it overwrites."""
        torch.mm(self._weight.T, self._sum_rows, out=self._patch_rows)
        _fold(self._patches, slope, self._stride, self._pad)


class Network:
    """A network of two convolutions and three linear layers, with buffers for batches of a fixed size."""

    def __init__(self, architecture: Architecture, batch: int) -> None:
        self.parameters, self.gradient = Buffer(architecture.shapes), Buffer(architecture.shapes)
        self._batch, parts, stride = batch, self.parameters.parts, architecture.stride
        self._one = Convolution(parts["conv1.weight"], parts["conv1.bias"], architecture.side, batch, stride=stride)
        self._two = Convolution(parts["conv2.weight"], parts["conv2.bias"], self._one.shape[1], batch, pad=1)
        self._between = _room(*self._one.shape)
        self._values: dict[str, torch.Tensor] = {}

    def load(self, images: Reals, which: Ids) -> None:
        self._one.input.reshape(-1, self._batch)[...] = images[which].T

    def scores(self) -> torch.Tensor:
        """Return the logits of the loaded images, with a row for each class and a column for each image."""
        self._one.forward()
        self._two.input[...] = self._one.output.reshape(self._one.shape)
        self._two.forward()
        value = torch.from_numpy(self._two.output).view(-1, self._batch)
        for layer in ("full1", "full2", "full3"):
            self._values[layer] = value
            weight, bias = self.parameters.parts[f"{layer}.weight"], self.parameters.parts[f"{layer}.bias"]
            value = torch.addmm(bias[:, None], weight, value)
            if layer != "full3":
                value.clamp_(min=0)
        return value

    def differentiate(self, labels: Ids) -> None:
        """Write the gradient of the mean cross-entropy of the loaded images into `gradient`."""
        slope = torch.softmax(self.scores(), 0)
        slope.numpy()[labels, np.arange(self._batch)] -= 1
        slope /= self._batch
        gradient = self.gradient.parts
        for layer in ("full3", "full2", "full1"):
            value = self._values[layer]
            torch.mm(slope, value.T, out=gradient[f"{layer}.weight"])
            torch.sum(slope, 1, out=gradient[f"{layer}.bias"])
            slope = self.parameters.parts[f"{layer}.weight"].T @ slope
            if layer != "full1":  # below full1, the backward pass of the convolution handles its ReLU
                slope = torch.where(value > 0, slope, 0.0)
        of_two, of_one = slope.numpy().reshape(self._two.output.shape), self._between.reshape(self._one.output.shape)
        self._two.backward(of_two, gradient["conv2.weight"], gradient["conv2.bias"])
        self._two.backward_to(self._between)
        self._one.backward(of_one, gradient["conv1.weight"], gradient["conv1.bias"])


def _room(*shape: int) -> Reals:
    """Return zeros, aligned to a cache line because alignment may change the last bits of results."""
    room: Reals = torch.zeros(shape).numpy()
    return room


@njit(cache=True)
def _unfold(image: Any, patches: Any, stride: int) -> None:
    """Copy image patches into columns (im2col), so that the convolution becomes one matrix product."""
    inputs, kernel, _, _, _, pooled, _, batch = patches.shape
    for c in range(inputs):
        for ky in range(kernel):
            for kx in range(kernel):
                for dy in range(2):
                    for dx in range(2):
                        for y in range(pooled):
                            for x in range(pooled):
                                source = image[c, (2 * y + dy) * stride + ky, (2 * x + dx) * stride + kx]
                                target = patches[c, ky, kx, dy, dx, y, x]
                                for b in range(batch):
                                    target[b] = source[b]


@njit(cache=True)
def _fold(patches: Any, image: Any, stride: int, pad: int) -> None:
    """Add patches back to the pixels they came from (col2im), without the padding; the transpose of `_unfold`."""
    inputs, kernel, _, _, _, pooled, _, batch = patches.shape
    side = image.shape[1]
    image[...] = 0
    for c in range(inputs):
        for ky in range(kernel):
            for kx in range(kernel):
                for dy in range(2):
                    for dx in range(2):
                        for y in range(pooled):
                            row = (2 * y + dy) * stride + ky - pad
                            if row < 0 or row >= side:
                                continue
                            for x in range(pooled):
                                column = (2 * x + dx) * stride + kx - pad
                                if column < 0 or column >= side:
                                    continue
                                target, source = image[c, row, column], patches[c, ky, kx, dy, dx, y, x]
                                for b in range(batch):
                                    target[b] += source[b]


@njit(cache=True)
def _pool(sums: Any, bias: Any, output: Any, winner: Any) -> None:
    """Compute 2×2 max pooling, bias and ReLU. `winner` gets the index of each maximum, or 4 where ReLU gives 0."""
    for c in range(len(sums)):
        a, b, d, e = sums[c, 0], sums[c, 1], sums[c, 2], sums[c, 3]
        shift, out, won = bias[c], output[c], winner[c]
        for i in range(len(a)):
            upper, lower = max(a[i], b[i]), max(d[i], e[i])
            best = max(upper, lower)
            of_upper, of_lower = np.uint8(b[i] > a[i]), np.uint8(2) + np.uint8(e[i] > d[i])
            value = best + shift
            which = of_lower if lower > upper else of_upper
            won[i] = which if value > 0 else np.uint8(4)
            out[i] = max(value, np.float32(0))


@njit(cache=True, fastmath=True)  # fastmath lets the sum be split into lanes; always the same, as the length is fixed
def _unpool(slope: Any, winner: Any, sums: Any, bias: Any) -> None:
    for c in range(len(slope)):
        s, won = slope[c], winner[c]
        total = np.float32(0)
        for i in range(len(s)):
            total += s[i] if won[i] < 4 else np.float32(0)
        bias[c] = total
        for position in range(4):
            target = sums[c, position]
            for i in range(len(s)):
                target[i] = s[i] if won[i] == position else np.float32(0)
