"""A sharded model whose script keeps a momentum of its own in distributed tensors, and does not protect it."""

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points
from torch.distributed.fsdp import fully_shard

import holdfast as hf


def main() -> None:
    """Train."""
    torch.manual_seed(1)
    run = hf.attach()
    model = network()
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.protect(model=model, optimizer=optimizer)
    momentum = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for before, parameter in zip(momentum, model.parameters(), strict=True):
                parameter.grad.copy_(before.mul_(0.5).add_(parameter.grad))
        optimizer.step()
        optimizer.zero_grad()


main()
