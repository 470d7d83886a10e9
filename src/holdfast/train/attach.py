"""How a process comes into its run: what `holdfast.attach()` does.

Started by `holdfast run`, by torchrun, or alone with `python train.py`, the same script works. Without a folder
nothing is saved, and the loop is a plain one.

The first call of torch's vector functions in a process, made here by one thread alone.

On x86, torch hands `sqrt`, `exp` and their like to oneMKL, which chooses a kernel when a process first calls one. Where
several threads make that first call together, one of them may compute its share with a less exact kernel (torch's issue
188792; seen in 18 of 9,000 processes on two busy cores, and in none of 9,000 that had called it before): the first step
of Adam in a worker that was started anew then differs from that of one that never stopped.
"""

import logging
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from holdfast.distributed import ranks
from holdfast.distributed.ranks import Ranks
from holdfast.history.tail import first_seed
from holdfast.runs.config import RunConfig, handed_over
from holdfast.train.run import Run
from holdfast.train.seed import overridden, seed_of_run
from holdfast.train.state import rng

FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2"),
    *("expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "round", "rsqrt", "sigmoid", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)


@cache
def settle() -> None:
    """Call each function once, on a single value: no thread is started for that, and later calls find what it chose."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)


logger = logging.getLogger(__name__)
SEED = "seed"


def attach(
    out: str | os.PathLike[str] | None = None,
    *,
    save_every: int | None = None,
    writer: str | None = None,
    max_inflight: int | None = None,
    keep_last: int | None = None,
    seed: int | None = None,
    timeout: float = 1800.0,
    extend: bool = False,
) -> Run:
    """The run this process belongs to. Under `holdfast run` its command says how to save and where; else these do.

    By default a save comes every 50 steps, by the writer `overlapped` with at most 2 under way, and 2 are kept. The
    random generators are keyed from the seed: every rank and every attempt draws the same first weights. The seed is
    that of the command if it gives one, else this one, else what the script gave to `torch.manual_seed` before, else 0.

    Under `holdfast run` the supervisor finds a peer that is stuck; without it, a collective that waits for one fails after
    `timeout` seconds. To `extend` a run is to train it for longer than it was to be.
    """
    how = {"save_every": save_every, "writer": writer, "max_inflight": max_inflight, "keep_last": keep_last}
    folder = os.environ.get("HOLDFAST_OUT")
    if folder is not None:
        config = handed_over(Path(folder))
        line = overridden({**how, "out": out and str(out)}, {**config.to_json(), "out": folder})
    else:
        given: dict[str, Any] = {name: value for name, value in how.items() if value is not None}
        config, line = RunConfig(script=sys.argv[0], args=tuple(sys.argv[1:]), extend=extend, **given), None
        folder = None if out is None else str(out)
    settle()
    script = rng.seeded()  # before anything keys them
    peers = ranks.join(timeout)
    config = replace(config, seed=_seed(peers, config.seed, seed, script, folder))
    if line and peers.rank == 0:
        logger.warning("%s", line)
    run = Run(config, peers, folder)
    rng.set_all(rng.key(run.seed, rng.START))
    return run


def _seed(peers: Ranks, command: int | None, attached: int | None, script: int | None, out: str | None) -> int:
    """The seed of the run, which rank 0 finds out for all."""
    if peers.rank:
        return int(peers.wait_for(SEED))
    recorded = first_seed(Path(out) / "history") if out is not None else None
    seed, line = seed_of_run(command, attached, script, recorded)
    if line:
        logger.warning("%s", line)
    peers.post(SEED, str(seed))
    return seed
