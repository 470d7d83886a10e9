"""A body and a head, replicated apart, that one backward pass goes through."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import holdfast as hf

run = hf.attach(seed=1)
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randint(8, (96,), generator=generator))
body, head = run.replicate(nn.Linear(8, 8)), run.replicate(nn.Linear(8, 8))
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
run.protect(body=body, head=head, optimizer=optimizer)
for x, y in run.batches(data, global_batch=12, num_epochs=4):
    loss = F.cross_entropy(head(body(x).relu()), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss)
