"""Trains a small model that is sharded with FSDP2, and evaluates it with `run.shard` on as many samples as the task says."""

import json
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf
from fsdp_script import sharded_network

task = json.loads(sys.argv[1])
run = hf.attach(seed=3)
model = sharded_network(run.mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
run.protect(model=model, optimizer=optimizer)
train = TensorDataset(torch.randn(8, 5), torch.randint(2, (8,)))
test = TensorDataset(torch.randn(task["samples"], 5), torch.randint(2, (task["samples"],)))
for x, y in run.batches(train, global_batch=4, num_epochs=1):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    part, right = run.shard(test), 0
    with torch.no_grad():
        for inputs, labels in DataLoader(part, batch_size=task["batch"]):
            right += int((model(inputs).argmax(dim=1) == labels).sum())
    run.print(f"right: {run.sum(right)} of {run.sum(len(part))}")
