"""The data sets of a matrix: images with their classes, read once and kept as plain arrays that every worker maps.

The networks of a matrix, by name, for images of any size and number of classes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from holdfast.errors import StorageFailed
from holdfast.workloads.images import LabeledImages, cifar10, cifar100

GENERATED, PATTERNS, SIDE = 4000, 10, 8
Load: TypeAlias = Callable[[Path | None], LabeledImages]


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set on the disk: the folder with `x.npy` and `y.npy`, and what a network must know of it."""

    folder: Path
    samples: int
    classes: int


def prepare_dataset(name: str, data: Path | None, folder: Path) -> PreparedData:
    """Read a data set, from the folder of data sets if it is not embedded, and keep it below `folder`."""
    place = folder / name
    try:
        if not (place / "y.npy").is_file():
            images = DATASETS[name](data)
            place.mkdir(parents=True, exist_ok=True)
            _put(place / "x.npy", images.x)
            _put(place / "y.npy", images.y)  # the last: with it the data set is there
        labels = np.load(place / "y.npy")
    except OSError as error:
        raise StorageFailed(f"cannot keep {name} in {place}: {error.strerror or error}; name another --out") from error
    return PreparedData(place, len(labels), int(labels.max()) + 1)


def _put(path: Path, values: np.ndarray) -> None:
    temporary = path.with_name("." + path.name)
    np.save(temporary, values)
    os.replace(temporary, path)


def _digits(_: Path | None) -> LabeledImages:
    """1,797 digits of 8×8 pixels, which come with scikit-learn."""
    from holdfast.workloads.datasets import load

    digits = load("digits")
    return LabeledImages((digits.x * 255).astype(np.uint8).reshape(-1, 1, 8, 8), digits.y)


def _generated(_: Path | None) -> LabeledImages:
    """Noisy copies of ten patterns of colours: data that every installation has, of any size."""
    rng = np.random.default_rng(0)
    labels = rng.integers(PATTERNS, size=GENERATED)
    patterns = rng.uniform(0, 255, (PATTERNS, 3, SIDE, SIDE))
    noisy = patterns[labels] + rng.normal(0, 64, (GENERATED, 3, SIDE, SIDE))
    return LabeledImages(noisy.clip(0, 255).astype(np.uint8), labels)


def _cifar10(data: Path | None) -> LabeledImages:
    return cifar10(data)[0]


def _cifar100(data: Path | None) -> LabeledImages:
    return cifar100(data)


DATASETS: dict[str, Load] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "digits": _digits,
    "generated": _generated,
}


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
