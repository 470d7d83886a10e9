"""The random generators of a rank: Python's, numpy's, torch's, and that of its CUDA device.

Before a share of a window is loaded they are keyed from where the run is, never from what was drawn before or from who
draws: whoever loads and trains a share, in whichever attempt, draws the same numbers. So keying is restoring; the states
are captured all the same, and a resumed run compares.
"""

import _random
import base64
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

START = "start"
WINDOW = "window"
_python = random._inst  # that of the functions of the module
CHOSEN = 1 << 32  # a process begins with 64 random bits for a seed, as keys have; seeds that people choose are small


def key(seed: int, purpose: str, *place: int) -> int:
    """64 bits for this purpose at this place of the run."""
    return int(xxhash.xxh3_64_intdigest(repr((seed, purpose, *place)).encode()))


def set_all(number: int) -> None:
    """Key every generator of this process; CUDA's only if the process uses CUDA."""
    # Not random.seed: it does this, once it has made sure that the seed is a number.
    _random.Random.seed(_python, number)
    _python.gauss_next = None  # type: ignore[attr-defined]  # as random.seed does
    np.random.seed(number & 0xFFFFFFFF)  # from more than 32 bits it takes longer than all the others together
    # Not torch.manual_seed: it looks for devices of every kind each time, which takes longer than a small step.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def seeded() -> int | None:
    """What the script has given to `torch.manual_seed`, if it has and the generator was not keyed since."""
    seed = torch.default_generator.initial_seed()
    return seed if seed < CHOSEN or seed >= (1 << 64) - CHOSEN else None


@dataclass(frozen=True, slots=True)
class States:
    """Where the generators of a process are that has no device: what it hands to one that goes on from there."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: bytes

    @classmethod
    def now(cls) -> "States":
        """Where they are."""
        name, keys, *rest = np.random.get_state(legacy=True)
        return cls(
            random.getstate(), (name, np.asarray(keys).tobytes(), *rest), torch.get_rng_state().numpy().tobytes()
        )

    def restore(self) -> None:
        """Go on from here."""
        random.setstate(self.python)
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))


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
