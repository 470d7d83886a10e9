"""The cases: each has a model, its samples, and the loss of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: a model, its samples, the samples per rank and step, and the length of a block."""

    build: Callable[[], nn.Module]
    samples: Callable[[], tuple[Tensor, Tensor]]
    share: int
    steps: int  # in one block
    blocks: int  # per arm in a repeat
    bf16: bool = False

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy, over every token if the samples are sequences."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            logits = model(x)
        return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())


class Tied(nn.Module):
    """A language model without attention whose last layer is its embedding."""

    def __init__(self, words: int = 4096, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(mlp([width, 4 * width, width], norm=True) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal self-attention, as in nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.into(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """A transformer of nanoGPT's shape (GPT-2 small: 124 M parameters), last layer tied to the embedding."""

    def __init__(
        self, words: int = 50304, width: int = 768, layers: int = 12, heads: int = 12, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(mlp([width, 4 * width, width], norm=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for norm, attention, feed in zip(self.norms, self.attentions, self.mlps, strict=True):
            x = x + attention(norm(x))
            x = x + feed(x)
        return self.head(self.norm(x))


def mlp(widths: list[int], *, norm: bool = False) -> nn.Sequential:
    """Return linear layers with a nonlinearity between them."""
    layers: list[nn.Module] = [nn.LayerNorm(widths[0])] if norm else []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU() if norm else nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def resnet() -> nn.Module:
    """Return a ResNet-18 of half the width, for small images."""
    from holdfast.workloads.resnet import ResNet  # only this case needs it

    return ResNet(18, 10, width=32, small=True)


def points(width: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return random labelled points."""
    return torch.randn(SAMPLES, width), torch.randint(classes, (SAMPLES,))


def texts(length: int, words: int, count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return random sequences of words, and for every word the one that follows it."""
    text = torch.randint(words, (count, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def images(size: int = 32, classes: int = 10, count: int = 512) -> tuple[Tensor, Tensor]:
    """Return random labelled images of CIFAR-10's size."""
    return torch.rand(count, 3, size, size), torch.randint(classes, (count,))


def megabytes(model: nn.Module) -> float:
    """Return the size of all gradients in megabytes."""
    return sum(parameter.nbytes for parameter in model.parameters()) / 1e6


def _gpt(share: int, steps: int) -> Case:
    return Case(build=GPT, samples=lambda: texts(1024, 50304, 512), share=share, steps=steps, blocks=2, bf16=True)


CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "small MLP": Case(
            build=lambda: mlp([64, 128, 128, 10]), samples=lambda: points(64), share=32, steps=40, blocks=6
        ),
        "MLP": Case(
            build=lambda: mlp([512, *[1024] * 6, 10]), samples=lambda: points(512), share=32, steps=4, blocks=4
        ),
        "tied weights": Case(build=Tied, samples=lambda: texts(16, 4096), share=4, steps=4, blocks=4),
        "ResNet-18": Case(build=resnet, samples=images, share=4, steps=3, blocks=4),
    },
    "cuda": {
        "nanoGPT-like, batch 8": _gpt(8, 10),
        "nanoGPT-like, batch 32": _gpt(32, 4),
        "24 linear layers": Case(
            build=lambda: mlp([2048] * 25), samples=lambda: points(2048, 2048), share=512, steps=30, blocks=2
        ),
    },
}
