"""Which blocks come back from a checkpoint after a failure. A recovery is a pure choice of block numbers.

The caller copies the chosen blocks with `Blocks.copy`; the simulator and the parameter server make the same choice.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Ids, State
from holdfast.errors import BadInput

Recovery: TypeAlias = Callable[[int, Ids], Ids]
"""From the number of blocks and the lost ones to the blocks that go back to their saved values."""


def full(count: int, lost: Ids) -> Ids:
    """Everything goes back: the state is exactly that of the checkpoint, and all work since is repeated."""
    return np.arange(count)


def partial(count: int, lost: Ids) -> Ids:
    """Only lost blocks go back: survivors keep newer values, so the state mixes iterations but is nearer (Thm 4.1)."""
    return np.asarray(lost, dtype=np.int64)


def fresh(count: int, lost: Ids) -> Ids:
    """As `partial`, but a block that was never saved gets what the workload's own rule says, and not its first value."""
    return partial(count, lost)


RECOVERIES: dict[str, Recovery] = {"full": full, "partial": partial, "fresh": fresh}


def recovery(name: str) -> Recovery:
    """The recovery of this name."""
    if name not in RECOVERIES:
        raise BadInput(f"there is no recovery {name!r}; choose one of {', '.join(RECOVERIES)}")
    return RECOVERIES[name]


def unsaved(how: Recovery, saved_at: Ids, lost: Ids) -> Ids:
    """The lost blocks that get a fresh value: under `fresh` those that were never saved since the first iteration.

    A rule goes by what is left of the state, so where nothing is left everything goes back to its first value.
    """
    if how is not fresh or len(lost) == len(saved_at):
        return np.zeros(0, np.int64)
    return np.asarray(lost[saved_at[lost] == 0], dtype=np.int64)


def recover(how: Recovery, blocks: Blocks, live: State, saved: State, lost: Ids) -> Ids:
    """Restore `live` in place from `saved` after losing blocks; returns the blocks that went back."""
    restored = how(len(blocks), lost)
    blocks.copy(saved, live, restored)
    return restored
