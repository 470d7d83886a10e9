"""Steps of an optimizer that are no part of a run: a script that trains without `run.batches` is told so once.

A supervisor starts any script again after a failure, and that may be all that is wanted, as where a trainer keeps
checkpoints of its own. But nobody should find out after a month that nothing was saved.

Where in a script a call comes from: within a loop of its own, or from leaving one.

Python tells neither. Both can be read from the instruction at which the script's frame stands.

Refuses loops that ask for a batch before the script is done with the one before it.

The boundary of a step is where the next batch is asked for. What a script does with a step after that is saved with the
next one, or not at all, and a run that goes on from there would be another.
"""

import dis
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from types import CodeType, FrameType, GeneratorType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import progress
from holdfast.errors import BadInput

# Where a frame stands when it lets go of an iterator in order: `break` and `return` pop it, a function ends.
_IN_ORDER = (
    "POP_TOP",
    "POP_ITER",
    "END_FOR",
    "RETURN_VALUE",
    "RETURN_CONST",
    "STORE_FAST",
    "STORE_NAME",
    "DELETE_FAST",
)
_SUSPENDED = ("YIELD_VALUE", "RESUME")


def left_in_order(generator: FrameType) -> bool:
    """Whether a generator, which is being closed, was left by `break` or `return`, and not by an exception.

    It may be left through others that hand on what it yields, such as a progress bar: those are closed first.
    """
    frame = generator.f_back
    while frame is not None:
        word = _instruction(frame)
        if word in _IN_ORDER:
            return True
        if not (frame.f_code.co_flags & inspect.CO_GENERATOR and word in _SUSPENDED):
            return False
        frame = frame.f_back
    return False


def in_a_loop() -> bool:
    """Whether whoever called us was called within a loop of the script that is run, at any depth of its functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and _loops_around(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


def _loops_around(code: CodeType, place: int) -> bool:
    """Whether a later instruction jumps back to before this place; a loop that asks for its next item is not in itself."""
    back = [each for each in dis.get_instructions(code) if "JUMP_BACKWARD" in each.opname and each.offset > place]
    return any(_begins(code, each.argval) < place for each in back)


def _begins(code: CodeType, target: int) -> int:
    while dis.opname[code.co_code[target]] == "EXTENDED_ARG":
        target += 2
    return target


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


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


LINE = (
    "holdfast: supervised only: these steps do not come from run.batches(). After a failure the script starts again, with "
    "checkpoints of its own if it keeps any; holdfast saves and checks nothing, protected or not."
)
_hook: Any = None


def watch() -> None:
    """In a worker, before its script: see whether the first step of an optimizer is one of a run."""
    global _hook
    if os.environ.get("RANK") == "0" and os.environ.get("HOLDFAST_ATTEMPT", "1") == "1":
        _hook = register_optimizer_step_post_hook(_Once())


def begun() -> None:
    """The steps from here on are those of a run."""
    global _hook
    progress.here.set_checked()
    if _hook is not None:
        _hook.remove()
        _hook = None


class _Once:
    def __init__(self) -> None:
        self._said = False

    def __call__(self, *_: Any) -> None:
        if not self._said:
            self._said = True
            sys.stderr.write(f"{LINE}\n")
            sys.stderr.flush()
