"""Whether the nodes that have come start now, or wait for those that have not. Pure: what was heard of each comes in.

All nodes start together. Those that have met before also start without the others, if these were not heard of for so
long that they count as lost, and if enough are left. That is one part of the nodes; that no other does the same is not
decided here, but by whoever takes the next term in the store of the checkpoints.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Two supervisors that call themselves the same node: one may be the dead predecessor of the other, which says no more.
ALIVE_WITHIN, SURELY = 1.5, 5  # seconds, and how often it was heard of
LISTENS = 2.0  # seconds between two looks; a longer gap is a pause of our own, in which we could not hear anybody


class Came(NamedTuple):
    """A supervisor that has come: its node, its own name, and whether it has met others before."""

    node: int
    who: str
    has_met: bool


@dataclass(slots=True)
class Heard:
    """When each supervisor was last heard of: it counts up for as long as it lives."""

    _counts: dict[str, int] = field(default_factory=dict)
    _times: dict[str, float] = field(default_factory=dict)
    _changes: dict[str, int] = field(default_factory=dict)
    _noted: float | None = None

    def note(self, counts: Mapping[str, int], now: float) -> None:
        """Take into account how far each has counted; whoever is asked for the first time is heard of now."""
        gap, self._noted = now - (now if self._noted is None else self._noted), now
        if gap > LISTENS:
            self._times = {who: time + gap for who, time in self._times.items()}
        for who, count in counts.items():
            if self._counts.get(who) != count:
                self._counts[who], self._times[who] = count, now
                self._changes[who] = self._changes.get(who, 0) + 1

    def silent(self, who: str, now: float) -> float:
        """For how long nothing was heard of it."""
        return now - self._times.get(who, now)

    def is_surely_alive(self, who: str, now: float) -> bool:
        """Whether it was heard of often, and a moment ago."""
        return self._changes.get(who, 0) >= SURELY and self.silent(who, now) < ALIVE_WITHIN


def lost(members: Mapping[str, int], heard: Heard, lost_after: float, now: float) -> list[int]:
    """The nodes among these, by the names of their supervisors, that were not heard of for too long."""
    return sorted(node for who, node in members.items() if heard.silent(who, now) >= lost_after)


def present(
    came: Sequence[Came],
    members: Mapping[str, int],
    heard: Heard,
    now: float,
    *,
    of: int,
    least: int,
    lost_after: float,
) -> Sequence[Came] | None:
    """Those that start now, or nothing if they are to wait; `members` are those that started last.

    If two of them are one node, that is a mistake which nobody is to wait for.
    """
    there = [each for each in came if heard.silent(each.who, now) < lost_after]
    nodes = {each.node for each in there}
    if len(nodes) < len(there):
        return there if all(heard.is_surely_alive(each.who, now) for each in there) else None
    if len(there) >= of:
        return there
    if len(there) < least or not any(each.has_met for each in there):
        return None
    return there if _are_lost(set(range(of)) - nodes, members, heard, lost_after, now) else None


def _are_lost(absent: Collection[int], members: Mapping[str, int], heard: Heard, lost_after: float, now: float) -> bool:
    """Whether none of these nodes may still come; those that did not take part were lost before."""
    return all(heard.silent(who, now) >= lost_after for who, node in members.items() if node in absent)
