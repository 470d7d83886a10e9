"""Which blocks come back from a checkpoint after a failure. A recovery is a pure choice of block numbers.

The caller copies the chosen blocks with `Blocks.copy`; the simulator and the parameter server make the same choice.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from holdfast.blocks import Blocks, Ids, State
from holdfast.errors import BadInput

Recovery: TypeAlias = Callable[[int, Ids], Ids]
"""From the number of blocks and the lost ones to the blocks that go back to their saved values."""


def full(count: int, lost: Ids) -> Ids:
    """Everything goes back: the state is exactly that of the checkpoint, and all work since is repeated."""
    return np.arange(count)


def partial(count: int, lost: Ids) -> Ids:
    """Only lost blocks go back: survivors keep newer values, so the state mixes iterations but is nearer (Thm 4.1)."""
    return np.asarray(lost, dtype=np.int64)


RECOVERIES: dict[str, Recovery] = {"full": full, "partial": partial}


def recovery(name: str) -> Recovery:
    """The recovery of this name."""
    if name not in RECOVERIES:
        raise BadInput(f"there is no recovery {name!r}; choose one of {', '.join(RECOVERIES)}")
    return RECOVERIES[name]


def recover(how: Recovery, blocks: Blocks, live: State, saved: State, lost: Ids) -> Ids:
    """Restore `live` in place from `saved` after losing blocks; returns the blocks that went back."""
    restored = how(len(blocks), lost)
    blocks.copy(saved, live, restored)
    return restored
