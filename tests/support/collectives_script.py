"""A training script that calls torch.distributed itself: for its loss, or once after every epoch."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from holdfast.train.attach import attach
from training_script import CLASSES, SAMPLES, WIDTH, Points

EPOCHS, BATCH = 4, 16


def scale(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss weighted over all ranks; the result depends on the number of ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return loss * (1 + total)


def main(exchanges: str, log: Path) -> None:
    run = attach()
    model = run.replicate(nn.Sequential(nn.Linear(WIDTH, 30), nn.ReLU(), nn.Linear(30, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.protect(model=model, optimizer=optimizer)
    steps = SAMPLES // BATCH
    for batch in run.batches(Points(augment=False), global_batch=BATCH, num_epochs=EPOCHS):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        (scale(loss) if exchanges == "step" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        with log.open("a") as file:
            file.write(f"{dist.get_rank()} of {dist.get_world_size()}\n")
        if exchanges == "epoch" and (batch.step + 1) % steps == 0:
            counted = torch.ones(())
            dist.all_reduce(counted)
            assert counted == dist.get_world_size(), "a rank is missing from the sum"


if __name__ == "__main__":
    main(json.loads(sys.argv[1])["exchanges"], Path(json.loads(sys.argv[1])["told"]))
