"""A language model whose hidden state is carried from step to step, as in PyTorch's word_language_model.

Each rank has its own hidden state, in the plain values that it protects.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

WORDS, WIDTH, LENGTH, SHARE, WORKERS = 11, 8, 5, 2, 3


class WordModel(nn.Module):
    """A recurrent network that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, hidden = self.recurrent(self.embedding(words), hidden)
        return self.head(output), hidden


run = hf.attach(seed=3)
text = torch.randint(WORDS, (96, LENGTH + 1), generator=torch.Generator().manual_seed(5))
model = run.replicate(WordModel())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
values = {"hidden": torch.zeros(1, SHARE, WIDTH), "words": 0, "loss": 0.0}
run.protect(model=model, optimizer=optimizer, values=values)
for batch in run.batches(text, global_batch=SHARE * WORKERS, num_epochs=int(sys.argv[1])):
    predicted, hidden = model(batch.data[:, :-1], values["hidden"])
    values["hidden"] = hidden.detach()
    values["words"] += batch.data[:, :-1].numel()
    loss = F.cross_entropy(predicted.flatten(0, 1), batch.data[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    values["loss"] += loss.item()
    run.log(loss=loss.item())
