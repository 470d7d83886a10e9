"""A script with two loops: it pretrains with a sampler and epochs, changes some protected state, and finetunes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler

import holdfast as hf

PRETRAINING, FINETUNING = 10, 12  # steps


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def main() -> None:
    """Train 10 steps of 14 samples, then 12 steps of 9: neither divides evenly among the ranks of a test."""
    run = hf.attach()
    body, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(16, 3)
    model = run.replicate(nn.Sequential(body, head))
    first = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    epochs = {"pretraining": 0}
    run.protect(model=model, first=first, second=second, epochs=epochs)
    sampler = WeightedRandomSampler(torch.arange(60).float(), 70)
    pretraining = run.epochs(data(60, 1), sampler=sampler, global_batch=14, num_epochs=2)
    finetuning = run.batches(data(40, 2), global_batch=9, num_epochs=3)
    for epoch in pretraining:
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            run.log(loss=loss.item())
            first.step()
            first.zero_grad()
        epochs["pretraining"] += 1
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(0.5)  # what is done between the loops happens once
    second.param_groups[0]["lr"] *= 3
    for batch in finetuning:
        assert batch.step < FINETUNING
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        run.log(loss=loss.item())
        second.step()
        second.zero_grad()
    run.print("trained", epochs, second.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
