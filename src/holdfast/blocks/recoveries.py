"""Choose the blocks to restore from a checkpoint after a failure; the caller copies them with `Blocks.copy`."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Ids, State
from holdfast.errors import BadInput

Recovery: TypeAlias = Callable[[int, Ids], Ids]
"""A function that returns the numbers of the blocks to restore. Its arguments: how many blocks exist, and which are lost."""


def full(count: int, lost: Ids) -> Ids:
    """Return the numbers of all `count` blocks: after a failure, the whole state returns to its saved values."""
    return np.arange(count)


def partial(count: int, lost: Ids) -> Ids:
    """Return `lost`: after a failure, only the lost blocks return to saved values. The others keep their newer values."""
    return np.asarray(lost, dtype=np.int64)


def fresh(count: int, lost: Ids) -> Ids:
    """Return `lost`, as `partial` does. The caller then computes new values for lost blocks that were never saved."""
    return partial(count, lost)


RECOVERIES: dict[str, Recovery] = {"full": full, "partial": partial, "fresh": fresh}


def recovery(name: str) -> Recovery:
    """Return the recovery function with this name: `full`, `partial` or `fresh`. Raise BadInput for another name."""
    if name not in RECOVERIES:
        raise BadInput(f"There is no recovery {name!r}: choose one of {', '.join(RECOVERIES)}.")
    return RECOVERIES[name]


def unsaved(how: Recovery, saved_at: Ids, lost: Ids) -> Ids:
    """Return the `lost` blocks that were never saved (`saved_at` is 0) and need new values.

    The result is empty unless `how` is `fresh` and some blocks survived."""
    if how is not fresh or len(lost) == len(saved_at):
        return np.zeros(0, np.int64)
    return np.asarray(lost[saved_at[lost] == 0], dtype=np.int64)


def recover(how: Recovery, blocks: Blocks, live: State, saved: State, lost: Ids) -> Ids:
    """Copy blocks from the checkpoint `saved` to the state `live`, and return the numbers of these blocks.

    `how` is the recovery, such as `partial`, which chooses the blocks to copy. `lost` has the numbers of the lost
    blocks."""
    restored = how(len(blocks), lost)
    blocks.copy(saved, live, restored)
    return restored
