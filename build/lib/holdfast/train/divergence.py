"""Decides from the digests of all ranks whether a bit has flipped, and on which rank.

Ranks with the same state form a group: all replicas, or the owner of a shard and the rank that keeps a copy of it. In a
group of three or more, most ranks are right. Two that differ do not tell which is right.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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


def compare_states(
    groups: Sequence[Mapping[int, Digests]], names: Sequence[str], what: str = "state"
) -> StateDifference | None:
    """Compare the states in each group, which should be equal; return the first difference, or None.

    A group has the digests of its ranks. `names` are the names of the tensors; a message calls a state `what`."""
    return next(filter(None, (_compare(group, names, what) for group in groups)), None)


def _compare(group: Mapping[int, Digests], names: Sequence[str], what: str) -> StateDifference | None:
    states = {rank: tuple(state) for rank, state in group.items()}
    (usual, count), *others = Counter(states.values()).most_common()
    if not others:
        return None
    wrong = tuple(sorted(rank for rank, state in states.items() if state != usual))
    parts = _differing(states[wrong[0]], usual, names)
    if 2 * count <= len(states):
        ranks = tuple(sorted(states))
        return StateDifference(
            ranks, None, f"{_listed(ranks)} differ in their {what} ({parts}; no majority tells which is right)"
        )
    right = tuple(sorted(states.keys() - set(wrong)))
    return StateDifference(wrong, wrong[0], f"{_listed(wrong)} had another {what} than {_listed(right)} ({parts})")


def _differing(one: Digests, other: Digests, names: Sequence[str]) -> str:
    parts = [name for name, a, b in zip(names, one, other, strict=True) if a != b]
    rest = len(parts) - SHOWN
    return ", ".join(parts[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 * SHOWN:
        return f"{len(ranks)} other ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
