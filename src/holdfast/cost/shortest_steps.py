"""The shortest compute time of each step among the ranks other than rank 0, which shows how long rank 0 waited for them.

Compute times include waiting for other ranks, so the rank with the shortest one was late.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from holdfast.cost.step_block import Numbers

Ranks = NDArray[np.int64]


class _Attempt:
    """The shortest compute time of each step of an attempt, and the lowest rank that had it."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._seconds: Numbers = np.zeros(0)
        self._ranks: Ranks = np.zeros(0, np.int64)

    def slices(self, first: int, steps: int) -> tuple[Numbers, Ranks]:
        """Return the values of `steps` steps, to read or to change."""
        before = max(0, self._first - first)
        after = max(0, first + steps - self._first - len(self._seconds))
        if before or after:
            room = before, after and after + len(self._seconds)  # so that steps may be added one by one
            self._seconds = np.pad(self._seconds, room, constant_values=np.inf)
            self._ranks = np.pad(self._ranks, room)
            self._first -= before
        start = first - self._first
        return self._seconds[start : start + steps], self._ranks[start : start + steps]


class ShortestSteps:
    """The shortest compute time of each step of each attempt, of the ranks that were added."""

    def __init__(self) -> None:
        self._attempts: dict[int, _Attempt] = {}

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def add(self, rank: int, attempt: int, first: int, compute: Numbers) -> None:
        """Add the compute times of steps of one rank, beginning with step `first`."""
        seconds, ranks = self._attempts.setdefault(attempt, _Attempt(first)).slices(first, len(compute))
        is_shorter = (compute < seconds) | ((compute == seconds) & (rank < ranks))
        np.copyto(seconds, compute, where=is_shorter)
        ranks[is_shorter] = rank

    def add_one(self, rank: int, attempt: int, step: int, compute: float) -> None:
        """Add the compute time of one step of one rank."""
        seconds, ranks = self._attempts.setdefault(attempt, _Attempt(step)).slices(step, 1)
        if (compute, rank) < (seconds[0], ranks[0]):
            seconds[0], ranks[0] = compute, rank

    def waited(self, attempt: int, first: int, compute: Numbers, into: defaultdict[int, float]) -> None:
        """Add to `into`, by late rank, the seconds that rank 0 waited in steps with the given `compute` times."""
        if (known := self._attempts.get(attempt)) is None:
            into[0] += 0.0
            return
        seconds, ranks = known.slices(first, len(compute))
        late = np.where(np.isinf(seconds), 0, ranks)
        waits = np.where(np.isinf(seconds), 0.0, np.maximum(0.0, compute - seconds))
        for rank in np.unique(late).tolist():
            into[rank] += float(waits[late == rank].sum())
