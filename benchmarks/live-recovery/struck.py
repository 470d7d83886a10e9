"""The training script that strikes.py runs, in one of several forms that real scripts have.

Run: holdfast run struck.py -- FORM EPOCHS CONTROL. Steps are slowed down until the folder CONTROL has a file `hurry`,
so that strikes hit a run that is still training. The forms:

- `plain`: SGD with momentum; `normed`: BatchNorm, dropout and AdamW;
- `averaged`: as normed, with an exponential moving average of the weights;
- `adversarial`: two models, two optimizers and two backward passes in each step;
- `accumulated`: two micro-batches in each step;
- `stateful`: each rank carries a hidden state of its own from step to step;
- `sampled`: a weighted sampler chooses the samples;
- `phased`: two loops, the second with a smaller batch and half of the samples.
"""

import itertools
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset, WeightedRandomSampler

import holdfast as hf

SAMPLES, BATCH, WIDTH, CLASSES = 4096, 64, 32, 4
PAUSE = 0.003
FORMS = ("plain", "normed", "averaged", "adversarial", "accumulated", "stateful", "sampled", "phased")
Train = Callable[[Any], torch.Tensor]


def raise_on_signal() -> None:
    """Raise an error wherever the script is when this process gets SIGUSR1."""

    def fail(*_: object) -> None:
        raise RuntimeError("struck from outside")

    signal.signal(signal.SIGUSR1, fail)


def network(form: str) -> nn.Module:
    """Return three layers, which `bucket_cap_mb` below divides into more than one bucket."""
    normed = form in ("normed", "averaged")
    between = [nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)] if normed else [nn.ReLU()]
    return nn.Sequential(nn.Linear(WIDTH, 256), *between, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def classifier(run: hf.Run, form: str) -> Train:
    """Return a function that trains one batch of a classifier, with the extra state of `form`."""
    net = run.replicate(network(form), bucket_cap_mb=0.1)
    parameters = net.parameters()
    plain = form == "plain"
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9) if plain else torch.optim.AdamW(parameters, lr=0.005)
    protected: dict[str, Any] = {"model": net, "optimizer": optimizer}
    average = AveragedModel(run.unwrap(net), multi_avg_fn=get_ema_multi_avg_fn(0.99)) if form == "averaged" else None
    if average is not None:
        protected["average"] = average
    hidden = {"mean": torch.zeros(WIDTH)}
    if form == "stateful":
        protected["hidden"] = hidden
    run.protect(**protected)

    def train(batch: Any) -> torch.Tensor:
        x, y = batch
        if form == "stateful":
            x = x + 0.1 * hidden["mean"]
            hidden["mean"] = 0.9 * hidden["mean"] + 0.1 * x.mean(0)
        loss = cross_entropy(net(x), y)
        (loss * batch.weight).backward()
        if batch.is_last:
            optimizer.step()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(run.unwrap(net))
        return loss

    return train


def adversarial(run: hf.Run) -> Train:
    """Return a function that trains a generator and a discriminator on one batch."""
    generator = run.replicate(nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, WIDTH)), bucket_cap_mb=0.01)
    discriminator = run.replicate(nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, discriminator)]
    run.protect(generator=generator, discriminator=discriminator, first=optimizers[0], second=optimizers[1])

    def train(batch: Any) -> torch.Tensor:
        x, _ = batch
        fake = generator(torch.randn(len(x), 8))
        optimizers[1].zero_grad()
        scores = discriminator(torch.cat([x, fake.detach()]))
        truth = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
        loss = binary_cross_entropy_with_logits(scores, truth)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        binary_cross_entropy_with_logits(discriminator(fake), torch.ones(len(x), 1)).backward()
        optimizers[0].step()
        return loss

    return train


def main(form: str, epochs: str, control: str) -> None:
    """Train; all random numbers of the network come from the seed of the run."""
    torch.set_num_threads(1)
    raise_on_signal()
    run = hf.attach()
    train = adversarial(run) if form == "adversarial" else classifier(run, form)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    hurry = Path(control) / "hurry"
    micro_batches = 2 if form == "accumulated" else 1
    how: dict[str, Any] = {"global_batch": BATCH, "num_epochs": int(epochs), "micro_batches": micro_batches}
    if form == "sampled":
        how["sampler"] = WeightedRandomSampler([1.0 + (label == 0) for label in y.tolist()], SAMPLES)
    loops = [run.batches(TensorDataset(x, y), **how)]
    if form == "phased":
        part = TensorDataset(x[::2], y[::2])
        loops.append(run.batches(part, global_batch=BATCH - 16, num_epochs=int(epochs)))
    for batch in itertools.chain(*loops):
        if not hurry.exists():
            time.sleep(PAUSE / micro_batches)
        run.log(loss=train(batch).item())


if __name__ == "__main__":
    main(*sys.argv[1:])
