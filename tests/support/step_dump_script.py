"""A training script that writes, for one step and every rank, the parameters before, the gradients and the parameters after."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.train.attach import attach

SAMPLES, EPOCHS, BATCH, STEP = 90, 12, 18, 7
WIDTH, LAYERS = 16, 4
BUCKET = 0.001  # megabytes: one layer per bucket


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def trainer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(0, WIDTH, (SAMPLES,), generator=generator)
    return list(zip(x, y, strict=True))


def main(folder: Path) -> None:
    run = attach()
    net = network()
    model = run.replicate(net, bucket_cap_mb=BUCKET)
    optimizer = trainer(model)
    run.protect(model=model, optimizer=optimizer)
    me, size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for batch in run.batches(samples(), global_batch=BATCH, num_epochs=EPOCHS):
        time.sleep(0.1 if run.world_size < size else 0.0)  # so that replacements arrive before the last step
        before = {name: each.detach().clone() for name, each in net.named_parameters()}
        x, y = batch
        F.cross_entropy(model(x), y).backward()
        gradients = {name: each.grad.clone() for name, each in net.named_parameters() if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if batch.step == STEP:
            after = {name: each.detach().clone() for name, each in net.named_parameters()}
            torch.save([before, gradients, after], folder / f"rank-{me}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
