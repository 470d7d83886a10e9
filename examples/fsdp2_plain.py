"""A small transformer, sharded with FSDP2, learns the language of a generated text."""

import argparse
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import checkpoint, data

CONTEXT = 32
CHARACTERS = " .abcdefghijklmnopqrstuvwxyz"
WORDS = ("the keeper", "a gull", "ties", "mends", "every knot", "the anchor", "at dawn", "in the fog")


class Text(data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every stretch of a generated text, and the same stretch one character further."""

    def __init__(self, words: int) -> None:
        draw = random.Random(0)
        text = " ".join(draw.choice(WORDS) for _ in range(words))
        self.codes = torch.tensor([CHARACTERS.index(character) for character in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        stretch = self.codes[start : start + CONTEXT + 1]
        return stretch[:-1], stretch[1:]


class Block(nn.Module):
    """Attention and a feed-forward network, computed again in backward to save memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return checkpoint.checkpoint(self.layer, x, mask, is_causal=True, use_reentrant=False)


class Transformer(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.character = nn.Embedding(len(CHARACTERS), width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.next = nn.Linear(width, len(CHARACTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.character(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.next(hidden)


def main() -> None:
    """Train, then print the loss of the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--words", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    dist.init_process_group()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    text, model = Text(options.words), Transformer(width=64, layers=2).to(device)
    precision = torch.float32 if device.type == "cpu" else torch.bfloat16  # few CPUs compute in bfloat16
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = data.DistributedSampler(text, drop_last=True)
    loader = data.DataLoader(text, options.batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
