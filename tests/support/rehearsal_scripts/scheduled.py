"""A schedule of the script's own that is not protected. One of torch's is refused before the first step."""

import sys

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf


class Schedule:
    """Lowers the learning rate with every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        """Set the rate of the next step."""
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.steps)


def main() -> None:
    """Train."""
    run = hf.attach()
    model = run.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_plain = "plain" in sys.argv
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12) if is_plain else Schedule(optimizer)
    run.protect(model=model, optimizer=optimizer)
    for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


main()
