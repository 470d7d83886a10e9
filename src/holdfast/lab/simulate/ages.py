"""The running checkpoint of a policy along a trajectory, kept as ages: at which iteration each block was last saved.

The values themselves are in the trajectory, so one table of small numbers serves every trial, whatever it loses.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from holdfast.blocks.division import Blocks, Ids, Norm
from holdfast.blocks.policy import BlockInfo, Policy
from holdfast.blocks.recoveries import Recovery, recover, unsaved
from holdfast.workloads.workload import Arrays

Renew: TypeAlias = Callable[[Arrays, Ids, Ids, int, int], Arrays]
"""From the state at a failure, the lost blocks, those of them that were never saved, the iteration that is next and the
stream of random numbers, to new values of the blocks that were never saved, packed."""


def ages(states: Sequence[Arrays], blocks: Blocks, norm: Norm, policy: Policy) -> Ids:
    """Row k, column b: the iteration at which block b of the running checkpoint was saved, once iteration k is done."""
    saved = {name: value.copy() for name, value in states[0].items()}
    nothing = {name: np.zeros_like(value) for name, value in saved.items()}
    saved_at = np.zeros(len(blocks), dtype=np.int64)
    credit = Fraction(0)
    rows = [saved_at.copy()]
    for step, state in enumerate(states[1:], start=1):
        if policy.due(step):
            standing = BlockInfo(norm(blocks, state, saved), norm(blocks, state, nothing), saved_at, blocks.sizes)
            ids, credit = policy.choose(step, standing, credit)
            blocks.copy(state, saved, ids)
            saved_at[ids] = step
        rows.append(saved_at.copy())
    return np.array(rows)


def recovered(
    states: Sequence[Arrays],
    blocks: Blocks,
    saved_at: Ids,
    how: Recovery,
    step: int,
    lost: Ids,
    renew: Renew | None = None,
    stream: int = 0,
) -> Arrays:
    """The state with which training goes on after losing blocks once iteration `step` is done.

    `saved_at` is the row of `ages` for that step; recovery `fresh` asks `renew` for what was never saved.
    """
    live = {name: value.copy() for name, value in states[step].items()}
    saved = checkpoint(states, blocks, saved_at)
    if len(ids := unsaved(how, saved_at, lost)):
        assert renew is not None, "recovery 'fresh' needs the workload's rule"
        blocks.unpack(renew(live, lost, ids, step, stream), ids, saved)
    recover(how, blocks, live, saved, lost)
    return live


def checkpoint(states: Sequence[Arrays], blocks: Blocks, saved_at: Ids) -> Arrays:
    """The running checkpoint in which each block has the value of the iteration it was saved at."""
    saved = {name: value.copy() for name, value in states[0].items()}
    for iteration in np.unique(saved_at):
        blocks.copy(states[iteration], saved, np.flatnonzero(saved_at == iteration))
    return saved
