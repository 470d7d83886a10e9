"""A small transformer learns the language of a generated text."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import holdfast as hf

CONTEXT = 48
CHARACTERS = " .abcdefghijklmnopqrstuvwxyz"
WHO = ("the sailor", "an old captain", "the keeper of the light", "a gull", "nobody", "the harbour master")
DOES = ("ties", "watches", "forgets", "mends", "follows", "trusts")
WHAT = ("the rope", "a small boat", "the rising tide", "every knot", "the anchor", "a distant storm")
WHEN = ("at dawn", "before the storm", "in the fog", "all night", "without a word", "when the wind turns")


class Text(data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every stretch of a generated text, and the same stretch one character further."""

    def __init__(self, sentences: int) -> None:
        words = random.Random(0)
        text = " ".join(
            " ".join(words.choice(part) for part in (WHO, DOES, WHAT, WHEN)) + "." for _ in range(sentences)
        )
        self.codes = torch.tensor([CHARACTERS.index(character) for character in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        stretch = self.codes[start : start + CONTEXT + 1]
        return stretch[:-1], stretch[1:]


class Transformer(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.character = nn.Embedding(len(CHARACTERS), width)
        self.place = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.next = nn.Linear(width, len(CHARACTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.character(x) + self.place(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.next(self.layers(hidden, mask=mask, is_causal=True))


def main() -> None:
    """Train, then say how well the text is predicted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=100)
    options = parser.parse_args()

    text = Text(options.sentences)
    run = hf.attach()
    model = run.replicate(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = options.epochs * (len(text) // options.batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    for x, y in run.batches(text, global_batch=options.batch, num_epochs=options.epochs):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    model.eval()
    with torch.no_grad():
        x, y = (
            torch.stack(part) for part in zip(*(text[i] for i in range(0, len(text), len(text) // 64)), strict=True)
        )
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    print(f"perplexity {loss.exp():.2f} of {len(CHARACTERS)} characters")


if __name__ == "__main__":
    main()
