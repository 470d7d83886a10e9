"""A small GPT in the manner of nanoGPT: random stretches of a text, an evaluation every so often, micro-batches."""

import argparse
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import holdfast as hf

CONTEXT = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = ("tide", "rope", "anchor", "gull", "storm", "harbour", "light", "knot", "sail", "mast", "wind", "deck")
LETTERS = sorted({" ", *"".join(WORDS)})


class Text(data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Words in a random order; sample number i is the stretch that begins at letter i, and the same one letter on."""

    def __init__(self, words: int, seed: int) -> None:
        text = " ".join(random.Random(seed).choices(WORDS, k=words))
        self.codes = torch.tensor([LETTERS.index(letter) for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[start : start + CONTEXT], self.codes[start + 1 : start + CONTEXT + 1]


def get_batch(text: Text, size: int) -> list[torch.Tensor]:
    """Stretches from random places of a text."""
    stretches = [text[int(start)] for start in torch.randint(len(text), (size,))]
    return [part.to(DEVICE) for part in data.default_collate(stretches)]


class GPT(nn.Module):
    """Predicts each next letter from those before it."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.next = nn.Linear(width, len(LETTERS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.letter(x) + self.place(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return F.cross_entropy(self.next(self.layers(hidden, mask=mask, is_causal=True)).flatten(0, 1), y.flatten())


@torch.no_grad()
def estimate_loss(model: nn.Module, text: Text, batches: int = 4) -> float:
    """The mean loss over a few random batches."""
    model.eval()
    losses = [float(model(*get_batch(text, 16))) for _ in range(batches)]
    model.train()
    return sum(losses) / len(losses)


def learning_rate(step: int, steps: int) -> float:
    """A short warm-up, then half a cosine."""
    return 4e-3 * min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def main() -> None:
    """Train, and say from time to time how well letters are predicted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--evaluate-every", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(1337)
    train, kept = Text(options.words, seed=1), Text(200, seed=2)
    steps = options.epochs * (len(train) // (options.batch * options.accumulate))
    run = hf.attach()
    model = run.replicate(GPT().to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.protect(model=model, optimizer=optimizer)
    for batch in run.steps(steps, global_batch=options.batch * options.accumulate):
        step = batch.step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        if step % options.evaluate_every == 0:
            run.print(f"step {step}: loss {estimate_loss(model, kept):.3f}")
        for _ in range(options.accumulate):
            x, y = get_batch(train, batch.data // options.accumulate)
            loss = model(x, y) / options.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {estimate_loss(model, kept):.3f} of {math.log(len(LETTERS)):.3f} without training")


if __name__ == "__main__":
    main()
