"""A generator and a discriminator, trained one after the other in every step, and an average of the generator's weights.

The first argument says where rank 1 kills itself in step 13: in the `first` or `second` backward, or `nowhere`.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast as hf
from holdfast.distributed.ranks import JOINS

WHERE, STEP, EPOCHS = sys.argv[1], 13, 4


def network(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.ReLU(), nn.Linear(widths[1], widths[2]))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


run = hf.attach(seed=1)
points = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
plain = network(4, 16, 8)
generator, discriminator = run.replicate(plain), run.replicate(network(8, 16, 1))
average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
adam_g, adam_d = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, discriminator))
run.protect(generator=generator, discriminator=discriminator, adam_g=adam_g, adam_d=adam_d, average=average)
for batch in run.batches(points, global_batch=12, num_epochs=EPOCHS):
    is_first_life = os.environ["HOLDFAST_ATTEMPT"] == "1" and JOINS not in os.environ
    strikes = is_first_life and run.rank == 1 and batch.step == STEP
    fake = generator(torch.randn(len(batch.data), 4))
    judged = discriminator(batch.data)
    if strikes and WHERE == "first":
        judged.register_hook(die)
    (F.softplus(-judged).mean() + F.softplus(discriminator(fake.detach())).mean()).backward()
    adam_d.step()
    adam_d.zero_grad()
    if strikes and WHERE == "second":
        fake.register_hook(die)
    loss = F.softplus(-run.unwrap(discriminator)(fake)).mean()  # its gradients are not summed: only the generator steps
    loss.backward()
    adam_g.step()
    adam_g.zero_grad()
    adam_d.zero_grad()
    average.update_parameters(plain)
    run.log(loss=loss.item())
    time.sleep(0.2 if run.world_size < int(os.environ["WORLD_SIZE"]) else 0.0)  # so that replacements arrive in time
