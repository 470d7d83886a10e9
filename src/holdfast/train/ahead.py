"""Refuses loops that ask for a batch before the script is done with the one before it.

The boundary of a step is where the next batch is asked for. What a script does with a step after that is saved with the
next one, or not at all, and a run that goes on from there would be another.
"""

import gc
import sys
from collections.abc import Iterator
from itertools import groupby
from types import GeneratorType
from typing import Any

from holdfast.errors import BadInput

# Iterators that ask for the next item to find out whether something is over.
LOOKING_AHEAD = (
    ("itertools", "groupby"),
    ("more_itertools.more", "peekable"),
    ("more_itertools.more", "seekable"),
    ("more_itertools.more", "bucket"),
)
DEPTH = 6  # iterators within iterators that are looked into
WIDTH = 64  # what one of them may hold
WAY = "for epoch in run.epochs(dataset, ...): for batch in epoch: ..., then what belongs to the end of the epoch"


def check_holder(*mine: object) -> None:
    """Refuse an iterator around one of these that asks for a batch before it is done with the one before it."""
    wanted = {id(each) for each in mine}
    kinds = {getattr(sys.modules.get(module), name, groupby) for module, name in LOOKING_AHEAD}
    for each in gc.get_objects():
        if type(each) in kinds and _holds(each, wanted, DEPTH):
            raise BadInput(
                f"{type(each).__name__} asks for the next batch before the script is done with a group of them, so what it does "
                f"after a group would not be saved with it: write {WAY}"
            )


def refused() -> BadInput:
    """What is said of a first batch that nothing was done with."""
    return BadInput(
        "the second batch was asked for before anything was done with the first (no backward, no step of an optimizer, no "
        "change of a protected model): ask for a batch once the one before it is trained, as `for batch in "
        "run.batches(...)` does. A batch that is fetched ahead would be lost in a restart"
    )


def _holds(holder: object, wanted: set[int], depth: int) -> bool:
    for each in _within(holder):
        if id(each) in wanted or (depth and _iterates(each) and _holds(each, wanted, depth - 1)):
            return True
    return False


def _within(holder: object) -> list[Any]:
    if isinstance(holder, GeneratorType):  # while it runs, the collector does not see into it
        frame = holder.gi_frame
        return list(frame.f_locals.values())[:WIDTH] if frame else []
    return gc.get_referents(holder)[:WIDTH]


def _iterates(value: object) -> bool:
    return isinstance(value, Iterator | dict) or (
        hasattr(type(value), "__iter__") and not isinstance(value, str | bytes)
    )
