"""Train a small network on synthetic digits: an ordinary PyTorch loop in which five lines use holdfast."""

import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf

EPOCHS, BATCH, SAMPLES = 6, 64, 1797

# Ten patterns of 8 x 8 points and noisy copies of them: no data set is needed.
source = torch.Generator().manual_seed(0)
labels = torch.randint(10, (SAMPLES,), generator=source)
images = torch.rand(10, 64, generator=source)[labels] + torch.randn(SAMPLES, 64, generator=source)
digits = torch.utils.data.TensorDataset(images, labels)

run = hf.attach()
model = run.replicate(
    nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(digits, global_batch=BATCH, num_epochs=EPOCHS):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log(loss=loss.item())
