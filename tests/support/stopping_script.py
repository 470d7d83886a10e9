"""A training script that ends as its argument says, as JSON."""

import json
import os
import sys

import torch
from torch import nn

from holdfast.train.attach import attach

TASK = {
    "stop_at": None,
    "break_at": None,
    "rank": None,
    "after": "",
    "exit_at": None,
    "fork_at": None,
    "how": "sys",
    **json.loads(sys.argv[1]),
}
RANKS = range(9) if TASK["rank"] is None else (TASK["rank"],)

run = attach()
model = run.replicate(nn.Linear(6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
data = [torch.full((6,), index / 14) for index in range(14)]
for epoch in run.epochs(data, global_batch=4, num_epochs=3):
    for batch in epoch:
        if batch.step == TASK["exit_at"]:
            (os._exit if TASK["how"] == "os" else sys.exit)(0)
        if batch.step == TASK["fork_at"] and os.fork() == 0:
            break
        if batch.step == TASK["break_at"] and run.rank in RANKS:
            break
        loss = model(batch.data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        if epoch.number == TASK["stop_at"] and run.rank in RANKS:
            run.stop()
        continue
    break
if TASK["after"] and run.rank == 0:
    raise ValueError(f"the evaluation failed, with a loss of {float(loss):.3f}")
