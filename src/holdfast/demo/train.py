"""Train a small network on handwritten digits: an ordinary PyTorch loop, with holdfast in five of its lines."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import holdfast as hf

EPOCHS, BATCH = 6, 64

images, labels = load_digits(return_X_y=True)
digits = torch.utils.data.TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))

run = hf.attach()
model = run.replicate(
    nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.protect(model=model, optimizer=optimizer)
for x, y in run.batches(digits, global_batch=BATCH, epochs=EPOCHS):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.note(loss=loss.item())
