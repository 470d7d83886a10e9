"""Choose the blocks to restore from a checkpoint after a failure; the caller copies them with `Blocks.copy`."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Ids, State
from holdfast.errors import BadInput

Recovery: TypeAlias = Callable[[int, Ids], Ids]
"""A function that returns the blocks to restore, given the number of blocks and the lost blocks."""


def full(count: int, lost: Ids) -> Ids:
    """Return the ids of all `count` blocks: the whole state is reset to the checkpoint, whatever was `lost`."""
    return np.arange(count)


def partial(count: int, lost: Ids) -> Ids:
    """Return the blocks to restore out of `count` blocks: only those in `lost`. The others keep their newer values."""
    return np.asarray(lost, dtype=np.int64)


def fresh(count: int, lost: Ids) -> Ids:
    """Return the blocks to restore out of `count` blocks: those in `lost`. The caller gives unsaved ones new values."""
    return partial(count, lost)


RECOVERIES: dict[str, Recovery] = {"full": full, "partial": partial, "fresh": fresh}


def recovery(name: str) -> Recovery:
    if name not in RECOVERIES:
        raise BadInput(f"There is no recovery {name!r}: choose one of {', '.join(RECOVERIES)}.")
    return RECOVERIES[name]


def unsaved(how: Recovery, saved_at: Ids, lost: Ids) -> Ids:
    """Return the `lost` blocks never saved (`saved_at` 0) if `how` is `fresh` and other blocks survive, else none."""
    if how is not fresh or len(lost) == len(saved_at):
        return np.zeros(0, np.int64)
    return np.asarray(lost[saved_at[lost] == 0], dtype=np.int64)


def recover(how: Recovery, blocks: Blocks, live: State, saved: State, lost: Ids) -> Ids:
    """Copy blocks from the checkpoint `saved` to `live`; `how` chooses them by the `lost` blocks. Return their ids."""
    restored = how(len(blocks), lost)
    blocks.copy(saved, live, restored)
    return restored
