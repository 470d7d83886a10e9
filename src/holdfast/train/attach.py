"""`holdfast.attach()`: make this process a part of its run.

The same script works under `holdfast run`, under torchrun, and alone with `python train.py`. Without a folder nothing
is saved, and the loop only hands out batches.

The seed of a new run is the value of `holdfast run --seed`, otherwise of `attach(seed=...)`, otherwise of
`torch.manual_seed` in the script before attach, otherwise 0. A run that resumes keeps its seed. For every other
parameter of attach, the options of `holdfast run` override the arguments in the script.
"""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from holdfast import progress
from holdfast.distributed import ranks
from holdfast.distributed.ranks import Ranks
from holdfast.errors import BadInput
from holdfast.history.tail import first_seed
from holdfast.runs.config import RunConfig, handed_over
from holdfast.sampler.plan import SEEDS
from holdfast.train.run import Run
from holdfast.train.state import rng

FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2"),
    *("expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "round", "rsqrt", "sigmoid", "sin", "sinh"),
    *("sqrt", "tan", "tanh", "trunc"),
)


@cache
def warm_up_math() -> None:
    """Call torch's elementwise math functions once, in a single thread, so that later results are reproducible.

    On x86, torch passes `sqrt`, `exp` and similar functions to oneMKL, which chooses a kernel at the first call in a
    process. If several threads make that first call together, a thread may use a less exact kernel (torch issue 188792).
    """
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
    save_bandwidth: int | None = None,
    seed: int | None = None,
    timeout: float = 1800.0,
    extend: bool = False,
) -> Run:
    """Return the run that this process belongs to, and seed all random generators.

    Every rank gets the same seed, so every rank draws the same initial weights. If the script is started by the command
    `holdfast run`, the options of the command override these parameters:

    - `out`: the folder of the run. Without `holdfast run` and without `out`, nothing is saved.
    - `save_every`: the number of steps between two snapshots, by default 50.
    - `writer`: "overlapped" (the default) writes snapshots while training continues; "blocking" writes them while
      training waits.
    - `max_inflight`: the largest number of snapshots that are written at the same time, by default 2.
    - `keep_last`: the number of snapshots to keep, by default 2.
    - `save_bandwidth`: the largest number of bytes that each rank writes to snapshots in a second. The last save of the
      run has no limit. By default, no save has a limit.
    - `seed`: the seed of the run. The run takes the first of these that is set: `holdfast run --seed`, the seed recorded
      in the folder of the run, this parameter, and the script's call of `torch.manual_seed`. Otherwise it is 0.
    - `timeout`: the seconds after which a collective fails if the script runs without `holdfast run`.
    - `extend`: if True, the script may plan more steps than it did when the run was started before. If False, a larger
      number of steps is an error."""
    how = {
        "save_every": save_every,
        "writer": writer,
        "max_inflight": max_inflight,
        "keep_last": keep_last,
        "save_bandwidth": save_bandwidth,
    }
    folder = os.environ.get("HOLDFAST_OUT")
    if folder is not None:
        config = handed_over(Path(folder))
        line = overridden({**how, "out": out and str(out)}, {**config.to_json(), "out": folder})
    else:
        given: dict[str, Any] = {name: value for name, value in how.items() if value is not None}
        config, line = RunConfig(script=sys.argv[0], args=tuple(sys.argv[1:]), extend=extend, **given), None
        folder = None if out is None else str(out)
    warm_up_math()
    script = rng.seeded()  # before anything keys them
    peers = ranks.join(timeout)
    config = replace(config, seed=_seed(peers, config.seed, seed, script, folder))
    if line and peers.rank == 0:
        logger.warning("%s", line)
    run = Run(config, peers, folder)
    rng.set_all(rng.key(run.seed, rng.START))
    return run


def _seed(peers: Ranks, command: int | None, attached: int | None, script: int | None, out: str | None) -> int:
    """Return the seed of the run, which rank 0 chooses and sends to the other ranks.

    `command` is the seed given by --seed, `attached` the argument of attach(), and `script` the script's own seed for
    torch. If the run has begun before, its seed is read from the history in the folder `out`."""
    if peers.rank:
        return int(peers.wait_for(SEED))
    is_standby = progress.here.is_standby  # it starts when the present attempt has trained
    recorded = first_seed(Path(out) / "history", has_trained=is_standby) if out is not None else None
    seed, line = seed_of_run(command, attached, script, recorded)
    if line:
        logger.warning("%s", line)
    peers.post(SEED, str(seed))
    return seed


def seed_of_run(
    command: int | None, attached: int | None, script: int | None, recorded: int | None
) -> tuple[int, str | None]:
    """Return the seed of the run, and a warning about given seeds that have no effect (None if all agree).

    The seed is the first of these that is not None: `command` (--seed), `recorded` (in the run's folder),
    `attached` (the argument of attach()), `script` (given to torch.manual_seed). If all are None it is 0."""
    if command is None and recorded is not None and attached not in (None, recorded):
        raise BadInput(
            f"the seed is {attached}, not {recorded} with which this run began: give attach() the same, or name another "
            "folder for a run with another seed"
        )
    given = {
        f"--seed {command}": command,
        "the one this run began with": recorded,
        f"attach(seed={attached})": attached,
        f"torch.manual_seed({script})": script,
    }
    seeds = {words: seed for words, seed in given.items() if seed is not None}
    if not seeds:
        return 0, None
    winner, seed = next(iter(seeds.items()))
    if not 0 <= seed < SEEDS:
        raise BadInput(f"the seed {seed} does not fit 64 bits: give 0 to {SEEDS - 1}")
    without_effect = [
        words for words, other in seeds.items() if other != seed and words != "the one this run began with"
    ]
    if not without_effect:
        return seed, None
    return seed, f"holdfast: the seed is {seed} ({winner}): {_without_effect(without_effect)}."


def overridden(given: Mapping[str, object], command: Mapping[str, object]) -> str | None:
    """Return a warning about arguments `given` to attach() that the `command` overrides; None if there are none."""
    lost = {name: value for name, value in given.items() if value is not None and value != command[name]}
    if not lost:
        return None
    says = ", ".join(f"--{name.replace('_', '-')} {command[name]}" for name in lost)
    return f"holdfast: the command says {says}: {_without_effect([f'attach({name}={value!r})' for name, value in lost.items()])}."


def _without_effect(names: list[str]) -> str:
    return f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect"
