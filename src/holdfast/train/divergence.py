"""Decides from the digests of all ranks whether a bit has flipped, and on which rank.

With replicas, most ranks are right. Two copies that differ do not tell which is right: that shows only when the steps
are repeated.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

SHOWN = 3  # tensors that a message names
Digests: TypeAlias = Sequence[Hashable]
"""A digest for each tensor of a state, in the same order on all ranks."""


@dataclass(frozen=True, slots=True)
class StateDifference:
    """Ranks whose states should be equal and are not. `culprit` is the rank that is wrong, or None if that is unknown."""

    ranks: tuple[int, ...]
    culprit: int | None
    because: str


def compare_replicas(states: Sequence[Digests], names: Sequence[str]) -> StateDifference | None:
    """Compare the states of all ranks, which should be equal; return None if they are."""
    (usual, count), *others = Counter(map(tuple, states)).most_common()
    if not others:
        return None
    if 2 * count <= len(states):
        parts = _differing(states[0], next(state for state in states if tuple(state) != tuple(states[0])), names)
        ranks = tuple(range(len(states)))
        return StateDifference(
            ranks, None, f"{_ranks(ranks)} had different states ({parts}; no majority tells which is right)"
        )
    wrong = tuple(rank for rank, state in enumerate(states) if tuple(state) != usual)
    parts = _differing(states[wrong[0]], usual, names)
    return StateDifference(
        wrong, wrong[0], f"{_ranks(wrong)} had another state than the other {_counted(count, 'rank')} ({parts})"
    )


def compare_copies(
    shards: Sequence[Digests], copies: Sequence[Digests], names: Sequence[str]
) -> StateDifference | None:
    """Compare the shard of each rank with the copy that the next rank keeps; return None if all are equal.

    `copies` has what each rank keeps: the copy of the shard of the rank before it."""
    size = len(shards)
    wrong = [rank for rank in range(size) if tuple(shards[rank]) != tuple(copies[(rank + 1) % size])]
    if not wrong:
        return None
    rank, keeper = wrong[0], (wrong[0] + 1) % size
    parts = _differing(shards[rank], copies[keeper], names)
    pairs = tuple(sorted({one for rank in wrong for one in (rank, (rank + 1) % size)}))
    return StateDifference(pairs, None, f"the shard of rank {rank} and its copy on rank {keeper} differed ({parts})")


def _differing(one: Digests, other: Digests, names: Sequence[str]) -> str:
    parts = [name for name, a, b in zip(names, one, other, strict=True) if a != b]
    rest = len(parts) - SHOWN
    return ", ".join(parts[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
