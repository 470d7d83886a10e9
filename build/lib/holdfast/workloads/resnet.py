"""Residual networks (He et al. 2016): ResNet-18 and ResNet-50, of any width, for small and large images."""

from torch import Tensor, nn
from torch.nn.functional import relu

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}  # blocks in each stage


class ResNet(nn.Module):
    """A residual network with 18 or 50 layers; `small` omits the initial downsampling for small images."""

    def __init__(self, depth: int, classes: int, *, width: int = 64, channels: int = 3, small: bool = False) -> None:
        super().__init__()
        convolution = _convolution(channels, width, 3) if small else _convolution(channels, width, 7, 2)
        pool = () if small else (nn.MaxPool2d(3, 2, 1),)
        self.stem = nn.Sequential(*convolution, nn.ReLU(inplace=True), *pool)
        blocks: list[nn.Module] = []
        inputs, bottleneck = width, depth == 50
        for stage, count in enumerate(STAGES[depth]):
            for number in range(count):
                stride = 2 if stage and number == 0 else 1
                blocks.append(_Residual(inputs, width << stage, stride, bottleneck=bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of images, given as floats in [0, 1] or as bytes."""
        fractions = x if x.is_floating_point() else x.float() / 255
        centred = (fractions - 0.5) * 4  # around 0, of about unit size
        scores: Tensor = self.head(self.stages(self.stem(centred)).mean((2, 3)))
        return scores


class _Residual(nn.Module):
    """A residual block of two 3×3 convolutions or, if `bottleneck`, of 1×1, 3×3 and 1×1 with four times the width."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        layers = [*_convolution(inputs, width, 1), nn.ReLU(inplace=True)] if bottleneck else []
        layers += [*_convolution(width if bottleneck else inputs, width, 3, stride), nn.ReLU(inplace=True)]
        self.convolutions = nn.Sequential(*layers, *_convolution(width, outputs, 1 if bottleneck else 3))
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.convolutions(x) + self.shortcut(x), inplace=True)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(*_convolution(inputs, outputs, 1, stride))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)
