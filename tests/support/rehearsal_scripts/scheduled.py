"""A scheduler that is not protected. With a counter of the script's own beside it, nothing tells that before it runs."""

import sys

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf


class Counter:
    """Counts steps; holdfast cannot know what else such a class holds."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    """Train."""
    run = hf.attach()
    model = run.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    counter = Counter()
    things = {} if "plain" in sys.argv else {"counter": counter}
    run.protect(model=model, optimizer=optimizer, **things)
    for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        counter.steps += 1


main()
