"""Nothing is wrong here: all that the next step reads is protected, and the run's own generators are drawn from."""

import torch
import torch.nn.functional as F
from subject import BATCH, EPOCHS, network, points

import holdfast as hf

run = hf.attach()
model = run.replicate(network())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
run.protect(model=model, optimizer=optimizer, scheduler=scheduler)
seen = 0
for batch in run.batches(points(), global_batch=BATCH, num_epochs=EPOCHS, micro_batches=2):
    x, y = batch
    loss = F.cross_entropy(model(x + 0.1 * torch.randn(x.shape)), y)
    (loss * batch.weight).backward()
    seen += len(y)
    if batch.is_last:
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
