"""Detection of random generators that a script made and draws from, and that the run does not restore.

The run seeds the global generators of torch, numpy and Python before each step. It does not know other generators. A
script may seed such a generator itself in each step, or protect its state: then nothing is lost.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from holdfast.train.observe.script_state import GENERATORS, Place, Search, is_global
from holdfast.train.observe.value_digests import generator_state, leaves, of_generator
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import local

MAX_BYTES = 8192  # of a tensor that may be the state of a generator: that of torch.Generator has 5056


class GeneratorCheck:
    """A search, after each of the first steps, for generators that were drawn from since the last search.

    `loaders` are the script's loaders whose position the run saves."""

    def __init__(self, protected: Protected, loaders: Iterable[object]) -> None:
        self._protected, self._loaders = protected, tuple(loaders)
        self._before: dict[int, tuple[object, _Seeding, str]] = {}  # with the generator itself, so that no id is reused

    def look(self, places: Iterable[Place]) -> list[str]:
        """Return a warning for each generator in `places` that was drawn from since the last call."""
        generators = _unrestored(places, self._protected, self._loaders)
        drawn = [place for place in generators if self._was_drawn_from(place.value)]
        self._before = {id(g.value): (g.value, _Seeding(g.value), of_generator(g.value)) for g in generators}
        return [_warning(place) for place in drawn]

    def _was_drawn_from(self, generator: Any) -> bool:
        _, seeding, state = self._before.get(id(generator), (None, None, ""))
        return seeding is not None and state != of_generator(generator) and seeding.leads_to(generator)


class _Seeding:
    """The part of a generator's state that changes if it is seeded again.

    A Mersenne Twister also changes it after 624 draws, and then counts as seeded again: no warning is better than a wrong
    one."""

    def __init__(self, generator: Any) -> None:
        self._seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None
        self._words = _words(generator)

    def leads_to(self, generator: Any) -> bool:
        """Return True if `generator` can have its present state without having been seeded again."""
        if isinstance(generator, torch.Generator):
            return bool(generator.initial_seed() == self._seed)
        return bool(np.array_equal(_words(generator), self._words))


def _words(generator: Any) -> Any:
    """Return the words of a Mersenne Twister, or the constant part of the state of another generator of numpy."""
    if isinstance(generator, torch.Generator):
        return None
    if isinstance(generator, random.Random):
        return np.array(generator.getstate()[1][:-1], np.uint32)
    bits = generator_state(generator)
    inner = bits["state"]
    return np.array(inner["key"]) if bits["bit_generator"] == "MT19937" else inner.get("inc")


def _unrestored(places: Iterable[Place], protected: Protected, loaders: Iterable[object]) -> list[Place]:
    """Return the generators of the script's variables that no protected object, protected state or loader restores."""
    owners = [*protected.own_objects.values(), *loaders]
    restored = {id(value) for owner in owners for value in _inside(owner)}
    found: list[Place] = []
    search = Search(places)
    for place in search:
        with suppress(Exception):  # a script may hold anything, such as a proxy of an object that does not exist yet
            if isinstance(place.value, DataLoader | Sampler):
                restored |= {id(value) for value in _inside(place.value)}
            if not isinstance(place.value, GENERATORS):
                search.expand(place)
            elif not place.foreign and not is_global(place.value):
                found.append(place)
    found = [place for place in found if id(place.value) not in restored]
    saved = _state_parts(protected.capture()) if found else set()
    return [place for place in found if not _state_parts(generator_state(place.value)) <= saved]


def _inside(owner: object) -> Iterator[object]:
    search = Search([Place(owner, "")])
    for place in search:
        with suppress(Exception):
            if isinstance(place.value, GENERATORS):
                yield place.value
            elif not isinstance(place.value, nn.Module):
                search.expand(place)


def _state_parts(state: Any) -> set[object]:
    """Return the parts of a nested state that may come from a generator: numbers, words, and tensors of a few bytes.

    A script may save the state of a generator in any form. All its parts are then among those of the protected state."""
    parts: set[object] = set()
    for _, value in leaves(state):
        if isinstance(value, int | float):
            parts.add(value)
        elif isinstance(value, np.ndarray) and value.dtype in (np.uint32, np.uint64):
            parts.update(value.ravel().tolist())
        elif isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel() <= MAX_BYTES:
            parts.add(bytes(local(value).flatten().tolist()))
    return parts


def _warning(place: Place) -> str:
    kind = type(place.value)
    module = "numpy.random" if kind.__module__.startswith("numpy.") else kind.__module__.split(".")[0].lstrip("_")
    module = "torch" if isinstance(place.value, torch.Generator) else module
    return (
        f"holdfast: {place.name} is a {module}.{kind.__name__} that the script made: holdfast does not restore it after a "
        "failure. Draw from the global generators (leave out generator=), or seed it in each step."
    )
