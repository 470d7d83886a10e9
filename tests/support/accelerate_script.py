"""A loop on Hugging Face's Accelerate, as docs/training.md describes it."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

import holdfast as hf


def main() -> None:
    """Train a small network for 15 steps whose samples do not divide evenly among two ranks."""
    run = hf.attach()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    x, y = torch.randn(75, 8), torch.randint(3, (75,))
    model = run.replicate(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3)).to(accelerator.device))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    run.protect(model=model, optimizer=optimizer)
    for batch in run.batches(TensorDataset(x, y), global_batch=15, num_epochs=3):
        inputs, targets = batch.to(accelerator.device)
        with accelerator.autocast():
            loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())
    accelerator.print("trained", accelerator.num_processes)


if __name__ == "__main__":
    main()
