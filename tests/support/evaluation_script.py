"""A script that evaluates between its steps and keeps the results; its task may kill a rank in an evaluation."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from holdfast.distributed.ranks import JOINS

torch.manual_seed(3)
KILLED = int(sys.argv[1])  # the number of the evaluation
points = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
kept = TensorDataset(torch.randn(13, 4), torch.randn(13, 1))

run = hf.attach()
model = run.replicate(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
progress = {"best": float("inf"), "total": 0.0}
run.protect(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress)
part = run.shard(kept)
assert run.sum(1) == int(os.environ["WORLD_SIZE"])  # also in a worker that joins later


def evaluate(number: int) -> float:
    """Return the mean loss on the validation data."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in DataLoader(part, batch_size=2):
            total += float((model(x) - y).square().sum())
            first = run.rank == 1 and os.environ["HOLDFAST_ATTEMPT"] == "1" and JOINS not in os.environ
            if number == KILLED and first:
                os.kill(os.getpid(), signal.SIGKILL)
    model.train()
    return float(run.mean(total / len(part), weight=len(part)))


for batch in run.batches(points, global_batch=8, num_epochs=2):
    x, y = batch.to(run.device)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    progress["total"] += loss.item()
    if batch.step % 4 == 3:
        found = evaluate(batch.step // 4)
        progress["best"] = min(progress["best"], found)
        scheduler.step(found)
run.print(run.sum([progress["total"], progress["total"] * run.rank]), progress)
