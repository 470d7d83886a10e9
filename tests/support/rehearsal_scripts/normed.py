"""Running statistics that are no part of the module's state_dict."""

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points
from torch import nn

import holdfast as hf


class Centred(nn.Module):
    """Subtracts a running mean of what it has seen, as BatchNorm does, and keeps it to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.rest = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.rest(x - self.mean)


run = hf.attach()
model = run.replicate(Centred())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
