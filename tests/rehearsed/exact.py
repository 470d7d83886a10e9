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
for batch in run.batches(points(), global_batch=BATCH, epochs=EPOCHS, accumulate=2):
    loss = F.cross_entropy(model(batch.x + 0.1 * torch.randn(batch.x.shape)), batch.y)
    (loss * batch.weight).backward()
    seen += len(batch.y)
    if batch.last:
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
