"""The decision whether the nodes that have come to a rendezvous start now, or wait for the others. Pure.

All nodes start together. Nodes that have met before also start without the others if these were silent for so long that
they count as lost, and if enough are left. That no other part of the nodes does the same is not decided here: only one
part can take the next term in the checkpoint store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Of two supervisors that claim the same node number, one may be the dead predecessor of the other, now silent.
ALIVE_WITHIN, SURELY = 1.5, 5  # seconds since the last heartbeat, and number of heartbeats
LISTENS = 2.0  # seconds between two updates; a longer gap is a pause of our own, in which we could not listen


class Arrival(NamedTuple):
    """A supervisor that has come to the rendezvous: its node, its own name, and whether it has met others before."""

    node: int
    who: str
    has_met: bool


@dataclass(slots=True)
class Heartbeats:
    """The time of each supervisor's last heartbeat: it counts up for as long as it lives."""

    _counts: dict[str, int] = field(default_factory=dict)
    _times: dict[str, float] = field(default_factory=dict)
    _changes: dict[str, int] = field(default_factory=dict)
    _updated: float | None = None

    def update(self, counts: Mapping[str, int], now: float) -> None:
        """Record the heartbeat `counts` read at time `now`; a supervisor seen for the first time is alive now."""
        gap, self._updated = now - (now if self._updated is None else self._updated), now
        if gap > LISTENS:
            self._times = {who: time + gap for who, time in self._times.items()}
        for who, count in counts.items():
            if self._counts.get(who) != count:
                self._counts[who], self._times[who] = count, now
                self._changes[who] = self._changes.get(who, 0) + 1

    def silence(self, who: str, now: float) -> float:
        """Return the seconds since the last heartbeat of `who`."""
        return now - self._times.get(who, now)

    def is_surely_alive(self, who: str, now: float) -> bool:
        """Return True if `who` sent many heartbeats, the last a moment ago."""
        return self._changes.get(who, 0) >= SURELY and self.silence(who, now) < ALIVE_WITHIN


def lost(members: Mapping[str, int], heartbeats: Heartbeats, lost_after: float, now: float) -> list[int]:
    """Return the nodes among `members` (node by supervisor) that were silent for `lost_after` seconds."""
    return sorted(node for who, node in members.items() if heartbeats.silence(who, now) >= lost_after)


def starting(
    arrivals: Sequence[Arrival],
    members: Mapping[str, int],
    heartbeats: Heartbeats,
    now: float,
    *,
    of: int,
    least: int,
    lost_after: float,
) -> Sequence[Arrival] | None:
    """Return the arrivals that start now, or None to wait; `members` are those that started last.

    Two arrivals for the same node start together, so that the mistake is reported instead of waited for.
    """
    alive = [arrival for arrival in arrivals if heartbeats.silence(arrival.who, now) < lost_after]
    nodes = {arrival.node for arrival in alive}
    if len(nodes) < len(alive):
        return alive if all(heartbeats.is_surely_alive(arrival.who, now) for arrival in alive) else None
    if len(alive) >= of:
        return alive
    if len(alive) < least or not any(arrival.has_met for arrival in alive):
        return None
    absent = set(range(of)) - nodes  # a node that is not in `members` was lost before
    may_come = (who for who, node in members.items() if node in absent)
    return alive if all(heartbeats.silence(who, now) >= lost_after for who in may_come) else None
