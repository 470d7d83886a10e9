"""The networks and data sets of a recovery matrix, by name; workers memory-map the stored data sets."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from holdfast.errors import StorageFailed
from holdfast.workloads.images import LabeledImages, cifar10, cifar100

if TYPE_CHECKING:
    from torch import nn

Build: TypeAlias = "Callable[[int, int, int], nn.Module]"
"""A function that builds a network from the channels and side length of images, and the number of classes."""
Load: TypeAlias = Callable[[Path | None], LabeledImages]
GENERATED, PATTERNS, SIDE = 4000, 10, 8


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set on disk: a folder with `x.npy` and `y.npy`, and the numbers of samples and classes."""

    folder: Path
    samples: int
    classes: int


def prepare_dataset(name: str, data: Path | None, folder: Path) -> PreparedData:
    """Store the arrays of the data set `name` below `folder`, unless they are there already.

    `data` is the folder with the user's data sets; built-in data sets do not need it."""
    place = folder / name
    try:
        if not (place / "y.npy").is_file():
            images = DATASETS[name](data)
            place.mkdir(parents=True, exist_ok=True)
            _save(place / "x.npy", images.x)
            _save(place / "y.npy", images.y)  # last: its presence means that the data set is complete
        labels = np.load(place / "y.npy")
    except OSError as error:
        raise StorageFailed(
            f"cannot store {name} in {place}: {error.strerror or error}; name another --out."
        ) from error
    return PreparedData(place, len(labels), int(labels.max()) + 1)


def _save(path: Path, values: np.ndarray) -> None:
    temporary = path.with_name("." + path.name)
    np.save(temporary, values)
    os.replace(temporary, path)


def _digits(_: Path | None) -> LabeledImages:
    """Return the 1,797 handwritten digits of 8×8 pixels that come with scikit-learn."""
    from holdfast.workloads.datasets import load

    digits = load("digits")
    return LabeledImages((digits.x * 255).astype(np.uint8).reshape(-1, 1, 8, 8), digits.y)


def _generated(_: Path | None) -> LabeledImages:
    rng = np.random.default_rng(0)
    labels = rng.integers(PATTERNS, size=GENERATED)
    patterns = rng.uniform(0, 255, (PATTERNS, 3, SIDE, SIDE))
    noisy = patterns[labels] + rng.normal(0, 64, (GENERATED, 3, SIDE, SIDE))
    return LabeledImages(noisy.clip(0, 255).astype(np.uint8), labels)


DATASETS: dict[str, Load] = {
    "cifar10": lambda data: cifar10(data)[0],
    "cifar100": cifar100,
    "digits": _digits,
    "generated": _generated,
}


def _resnet(depth: int, width: int, channels: int, side: int, classes: int) -> "nn.Module":
    from holdfast.workloads.resnet import ResNet

    return ResNet(depth, classes, width=width, channels=channels, small=True)


def _mlp(width: int, channels: int, side: int, classes: int) -> "nn.Module":
    from torch import nn

    inputs = channels * side * side
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(nn.Flatten(), *layers)


# An MLP has many parameters for the work of a step, so its saves are large beside its steps.
NETWORKS: dict[str, Build] = {
    "resnet18": partial(_resnet, 18, 64),
    "resnet50": partial(_resnet, 50, 64),
    "resnet18-narrow": partial(_resnet, 18, 16),
    "mlp": partial(_mlp, 2048),
    "mlp-small": partial(_mlp, 64),
}
