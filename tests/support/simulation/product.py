"""Gives the product's modules the simulated clock in place of the real one, for the length of one schedule."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from holdfast import memory
from holdfast.checkpoint import objects, snapshot, writer
from holdfast.distributed import gloo_link, membership, ranks
from holdfast.supervise.nodes import close_round
from holdfast.supervise.workers import membership_control
from simulation.scheduler import World

_CLOCKED = (snapshot, writer, ranks, close_round, membership, gloo_link, membership_control)
_is_name, _checked = lru_cache(4096)(objects.is_name), lru_cache(4096)(objects.checked)  # a schedule has few names
_POLL = 0.05  # seconds; a shorter sleep is one of a task that looks again and again
NOON = 1.7e9


class Clock:
    """The functions of the module `time`, on the simulated clock."""

    def __init__(self, world: World) -> None:
        self._world = world

    def sleep(self, seconds: float) -> None:
        (self._world.poll if seconds < _POLL else self._world.sleep)(seconds)

    def monotonic(self) -> float:
        return self._world.now

    perf_counter = monotonic

    def time(self) -> float:
        return NOON + self._world.now


class Names:
    """The functions of the module `secrets`, from the seed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def token_hex(self, size: int) -> str:
        return self._world.rng.randbytes(size).hex()


@contextmanager
def simulated(world: World, *others: tuple[Any, str, Any]) -> Iterator[None]:
    """Let the product's modules use the clock and the random names of `world`, and log nothing.

    `others` are more names of modules to replace: the module, the name and the new value."""
    clock, names = Clock(world), Names(world)
    changes: list[tuple[Any, str, Any]] = [(module, "time", clock) for module in _CLOCKED]
    changes += others
    changes.append((close_round, "secrets", names))
    changes.append((memory, "require", lambda name, size: None))  # it reads /proc each time, and the state is tiny
    changes += [(objects, "is_name", _is_name), (objects, "checked", _checked)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    logger = logging.getLogger("holdfast")
    level = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        logger.setLevel(level)
        for module, name, value in before:
            setattr(module, name, value)
