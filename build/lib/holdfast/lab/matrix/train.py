"""Train one network of a recovery matrix: an ordinary PyTorch loop that `holdfast run` starts in every worker."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import holdfast as hf
from holdfast.lab.matrix.models_and_data import NETWORKS

Parameters = Iterator[torch.nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=NETWORKS, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()

    torch.backends.cudnn.deterministic = True  # otherwise repeated steps differ on a GPU
    x, y = (torch.from_numpy(np.load(options.data / name, mmap_mode="c")) for name in ("x.npy", "y.npy"))
    run = hf.attach()
    network = NETWORKS[options.model](x.shape[1], x.shape[2], options.classes).to(run.device)
    model = run.replicate(network)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    run.protect(model=model, optimizer=optimizer)
    for images, labels in run.batches(TensorDataset(x, y), global_batch=options.batch, steps=options.steps):
        scaled = images.to(run.device).float() / 255
        loss = F.cross_entropy(model(scaled), labels.to(run.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item())


if __name__ == "__main__":
    main()
