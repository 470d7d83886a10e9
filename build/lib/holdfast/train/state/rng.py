"""The random generators of a rank: those of Python, numpy, torch, and its CUDA device.

They are seeded before each step's samples are loaded, with a key derived only from the run's seed and the position in
the run. So any process that loads and trains these samples, in any attempt, draws the same numbers, and seeding is
enough to restore the generators. A snapshot holds digests of their states, which a resumed run compares with its own.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

START = "start"
WINDOW = "window"
CHOSEN = 1 << 32  # people choose small seeds; unseeded processes and our keys have 64 random bits


def key(seed: int, purpose: str, *place: int) -> int:
    """Return a 64-bit seed that is derived from `seed`, `purpose`, and the numbers `place`, such as epoch and rank."""
    return int(xxhash.xxh3_64_intdigest(repr((seed, purpose, *place)).encode()))


def set_all(number: int) -> None:
    """Seed the generators of Python, numpy and torch with `number`. Include CUDA if this process uses it."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # more than 32 bits would take longer than all other generators together
    # torch.manual_seed looks for devices of every kind each time, which takes longer than a small step.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def seeded() -> int | None:
    """Return the seed that the script passed to `torch.manual_seed`; None if the script did not seed torch."""
    seed = torch.default_generator.initial_seed()
    return seed if seed < CHOSEN or seed >= (1 << 64) - CHOSEN else None


@dataclass(frozen=True, slots=True)
class States:
    """The states of the random generators in a loader process, to be set in the training process."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: bytes

    @classmethod
    def now(cls) -> "States":
        """Return the current states of the random generators of Python, numpy and torch (on the CPU)."""
        name, keys, *rest = np.random.get_state(legacy=True)
        return cls(
            random.getstate(), (name, np.asarray(keys).tobytes(), *rest), torch.get_rng_state().numpy().tobytes()
        )

    def restore(self) -> None:
        """Set the random generators of this process to these states."""
        random.setstate(self.python)
        name, keys, *rest = self.numpy
        np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))


@contextmanager
def seeded_with(number: int) -> Iterator[None]:
    """Seed the CPU's random generators with `number` inside this context, and restore their states on exit."""
    before = States.now()
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        before.restore()


def capture() -> dict[str, str]:
    """Return digests of the generators' states, under the names python, numpy, torch and (if in use) cuda."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": np.asarray(keys).tobytes() + repr(rest).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: str(xxhash.xxh3_64_hexdigest(state)) for name, state in states.items()}


def key_and_compare(key: int, saved_key: int, saved: Mapping[str, Any] | None) -> str:
    """Seed the generators with `key`; return how they compare with `saved`, their digests in the restored snapshot.

    Return "restored" if seeding with `saved_key` gives the states `saved`, "none" if it does not (a library seeds in
    another way now), and "keyed" if `saved` is None."""
    is_same = False
    if saved is not None:
        set_all(saved_key)
        is_same = capture() == saved
    set_all(key)
    return "keyed" if saved is None else "restored" if is_same else "none"
