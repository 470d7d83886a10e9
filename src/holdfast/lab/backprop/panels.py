"""The networks and data sets of backprop-tradeoff, with their hyperparameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import SGD

    from holdfast.workloads.images import LabeledImages

WORKERS = 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingTask:
    """A network to train, with its data and hyperparameters."""

    data: str
    build: "Callable[[], nn.Module]"
    train: "tuple[Tensor, Tensor]"
    test: "tuple[Tensor, Tensor]"
    share: int  # samples that a worker trains per mini-batch
    rate: float  # learning rate
    momentum: float = 0.9
    decay: float = 5e-4
    phases: tuple[int, int, int] = (0, 4, 8)  # epochs in whose middle failures happen
    whole: bool = True  # mini-batches without a failure are one batch, otherwise worker by worker to save memory

    @property
    def batch(self) -> int:
        return WORKERS * self.share

    def optimizer(self, model: "nn.Module") -> "SGD":
        from torch.optim import SGD

        return SGD(model.parameters(), lr=self.rate, momentum=self.momentum, weight_decay=self.decay)


Load: TypeAlias = Callable[[Path | None], TrainingTask]


@dataclass(frozen=True, slots=True)
class BackpropPanel:
    """A network on a data set; `full` loads the task of the lossy-recovery paper, and `quick` a small, fast task."""

    name: str
    full: Load
    quick: Load
    epoch: int  # mini-batches in an epoch of the paper
    note: str = ""


def _resnet18(data: Path | None) -> TrainingTask:
    from holdfast.workloads.images import cifar10

    train, test = map(_tensors, cifar10(data))
    build = partial(_resnet, 18, 10, width=16, small=True)
    return TrainingTask(data="cifar10", build=build, train=train, test=test, share=32, rate=0.1, phases=(0, 4, 12))


def _resnet50(data: Path | None) -> TrainingTask:
    from holdfast.workloads.images import TINY_CLASSES, tiny_imagenet

    train, test = map(_tensors, tiny_imagenet(data))
    name, build = f"tinyimagenet, {TINY_CLASSES} classes", partial(_resnet, 50, TINY_CLASSES)
    return TrainingTask(data=name, build=build, train=train, test=test, share=32, rate=0.05, phases=(0, 6, 14))


def _digits(depth: int, _: Path | None) -> TrainingTask:
    """Return a small task: 160 images of 8×8 pixels, and a ResNet of the given depth with 1/8 of the usual width."""
    import torch

    from holdfast.workloads.datasets import load

    digits = load("digits")
    x, y = torch.tensor(digits.x).reshape(-1, 1, 8, 8), torch.tensor(digits.y)
    train, test = (x[:160], y[:160]), (x[-400:], y[-400:])
    build = partial(_resnet, depth, 10, width=8, channels=1, small=True)
    return TrainingTask(data="digits", build=build, train=train, test=test, share=4, rate=0.05)


def _nt3(data: Path | None) -> TrainingTask:
    from holdfast.workloads.nt3 import GENES, NT3, generated, tables, tensors

    files = tables(data)
    train, test = map(tensors, files or generated())
    genes = train[0].shape[1] if files else GENES
    return TrainingTask(
        data="generated" if files is None else "its tables",
        build=lambda: NT3(genes),
        train=train,
        test=test,
        share=20,
        rate=0.001,  # the benchmark's own
        momentum=0.0,
        decay=0.0,
        whole=False,
    )


def _small_nt3(data: Path | None) -> TrainingTask:
    from holdfast.workloads.nt3 import NT3, generated, tensors

    train, test = map(tensors, generated(600, 320, 400, different=0.4, effect=2.0))
    return TrainingTask(
        data="600 generated genes",
        build=lambda: NT3(600, filters=8),
        train=train,
        test=test,
        share=8,
        rate=0.03,
        decay=0.0,
        whole=False,
    )


def _resnet(depth: int, classes: int, **options: Any) -> "nn.Module":
    from holdfast.workloads.resnet import ResNet

    return ResNet(depth, classes, **options)


def _tensors(images: "LabeledImages") -> "tuple[Tensor, Tensor]":
    import torch

    return torch.tensor(images.x), torch.tensor(images.y)


PANELS: dict[str, BackpropPanel] = {
    panel.name: panel
    for panel in (
        BackpropPanel(
            "resnet18-cifar10",
            _resnet18,
            partial(_digits, 18),
            390,
            "this panel is not in the paper. To be small enough for a CPU, the network has a quarter of the width of "
            "ResNet-18, and trains on the first 10,000 images. Costs of checkpoint-restart are computed with the epoch of the "
            "paper's ResNet-50 (390 mini-batches).",
        ),
        BackpropPanel(
            "resnet50-tinyimagenet",
            _resnet50,
            partial(_digits, 50),
            390,
            "the data has 25 of the 200 classes that the paper uses, so an epoch has 48 mini-batches here and 390 in the paper. "
            "Costs of checkpoint-restart are computed with 390. The test images are those of the validation set.",
        ),
        BackpropPanel(
            "nt3",
            _nt3,
            _small_nt3,
            55,
            "the data is generated, with the shape of the data of the NT3 benchmark, unless --data has its tables. An epoch is "
            "one pass over the data: 7 mini-batches of 160 samples, 20 for each of 8 workers. The costs of checkpoint-restart are "
            "computed with 55 mini-batches in an epoch, as in the paper.",
        ),
    )
}
