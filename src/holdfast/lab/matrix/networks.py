"""The networks of a matrix, by name, for images of any size and number of classes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import nn

Build: TypeAlias = "Callable[[int, int, int], nn.Module]"
"""From the channels and the side of an image, and the number of classes, to a network."""

WIDE = 2048


def _resnet(depth: int, width: int) -> Build:
    def build(channels: int, side: int, classes: int) -> "nn.Module":
        from holdfast.workloads.resnet import ResNet

        return ResNet(depth, classes, width=width, channels=channels, small=True)

    return build


def _mlp(width: int) -> Build:
    def build(channels: int, side: int, classes: int) -> "nn.Module":
        from torch import nn

        inputs = channels * side * side
        layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
        return nn.Sequential(nn.Flatten(), *layers)

    return build


# A network of full layers has many parameters for what it computes: its saves are large beside its steps.
NETWORKS: dict[str, Build] = {
    "resnet18": _resnet(18, 64),
    "resnet50": _resnet(50, 64),
    "resnet18-narrow": _resnet(18, 16),
    "mlp": _mlp(WIDE),
    "mlp-small": _mlp(64),
}
