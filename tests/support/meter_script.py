"""A script that protects a counter of its own class and batch-norm buffers that are not copied from rank 0.

The first argument says when the counter counts: before `backward`, or at the `end` of a step. The second is `norm` for
a model with batch-norm, otherwise `plain`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import holdfast as hf

WHEN, MODEL = sys.argv[1:]


class Meter:
    """A counter of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.steps = state["steps"]


run = hf.attach(seed=1)
points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
middle: nn.Module = nn.BatchNorm1d(16) if MODEL == "norm" else nn.ReLU()
model = run.replicate(nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 8)), broadcast_buffers=False)
optimizer, meter = torch.optim.Adam(model.parameters(), lr=0.01), Meter()
run.protect(model=model, optimizer=optimizer, meter=meter)
for batch in run.batches(points, global_batch=12, num_epochs=4):
    loss = (model(batch.data) - batch.data).square().mean()
    meter.steps += WHEN == "backward"
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    meter.steps += WHEN == "end"
