"""The random generators of a rank: Python's, numpy's, torch's, and that of its CUDA device.

At each boundary they are keyed from where the run is, never from what was drawn before or from who draws: whoever
trains a share of a window, in whichever attempt, draws the same numbers. So keying is restoring; the states are
captured all the same, and a resumed run compares.
"""

import base64
import random
from typing import Any

import numpy as np
import torch
import xxhash

START = "start"
LOAD = "load"
TRAIN = "train"


def key(seed: int, purpose: str, *place: int) -> int:
    """64 bits for this purpose at this place of the run."""
    return int(xxhash.xxh3_64_intdigest(repr((seed, purpose, *place)).encode()))


def set_all(number: int) -> None:
    """Key every generator of this process; CUDA's only if the process uses CUDA."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # from more than 32 bits it takes longer than all the others together
    # Not torch.manual_seed: it looks for devices of every kind each time, which takes longer than a small step.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def capture() -> dict[str, Any]:
    """The states of the generators as JSON values."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, _text(np.array(words, np.uint32)), gauss],
        "numpy": [_text(np.asarray(keys, np.uint32)), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return states


def _text(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()
