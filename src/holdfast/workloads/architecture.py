"""The sizes of a small convolutional network, and the shapes of its parameters that follow from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of the network: square images, two convolutions (the second 3×3, padded by 1), three full layers."""

    side: int
    classes: int
    kernel: int
    stride: int
    channels: tuple[int, int]
    hidden: tuple[int, int]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, in order: laid out as PyTorch does, outputs first."""
        (first, second), (third, fourth) = self.channels, self.hidden
        pooled = ((self.side - self.kernel) // self.stride + 1) // 2
        weights: dict[str, tuple[int, ...]] = {
            "conv1": (first, 1, self.kernel, self.kernel),
            "conv2": (second, first, 3, 3),
            "full1": (third, second * (pooled // 2) ** 2),
            "full2": (fourth, third),
            "full3": (self.classes, fourth),
        }
        return {
            f"{layer}.{part}": size
            for layer, shape in weights.items()
            for part, size in (("weight", shape), ("bias", shape[:1]))
        }
