"""Which workers the others wait for. Pure: what one look at them shows comes in, and those that keep the rest come out.

A worker that waits for a peer has passed more boundaries, or begun more exchanges, than the peer: whoever is furthest
behind is waited for. Where members were lost, those that are left wait for whoever has not come to find together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.progress import Phase

Place = tuple[int, int]  # boundaries passed, exchanges begun since


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look at a running worker shows."""

    rank: int
    boundaries: int = 0
    posted: int = 0
    moved: int = 0
    phase: Phase = Phase.STARTING
    stopped: bool = False
    asleep: bool = True  # it neither computes, nor stands in line for a processor, nor waits for a disk
    joins: bool = False  # it is on its way to take the place of a lost one

    @property
    def place(self) -> Place:
        return self.boundaries, self.posted


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How far the workers of other nodes are: the place of the last of them, and the bytes that all have moved."""

    place: Place | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Awaited:
    """Workers of which one keeps the others, if all of them are overdue; `surely` if others are seen to wait."""

    workers: Sequence[Seen]
    surely: bool = False


def awaited(workers: Sequence[Seen], elsewhere: Place | None) -> list[Awaited]:
    """Those that may keep the others, as far as places and phases tell."""
    members = [each for each in workers if not each.joins and each.phase is not Phase.ENDED]
    starting = [each for each in workers if each.joins and each.phase is not Phase.JOINING]
    found = [Awaited([each]) for each in starting]
    if any(each.phase is Phase.RECOVERING for each in members):
        joining = [each for each in workers if each.joins and each.phase is Phase.JOINING]
        return [*found, *_finding_together(members, starting, joining)]
    return [*found, *_behind(members, elsewhere)]


def _finding_together(members: list[Seen], starting: list[Seen], joining: list[Seen]) -> Iterator[Awaited]:
    """Members were lost, or others join: whoever is not there is waited for, however far it is."""
    absent = [each for each in members if each.phase is not Phase.RECOVERING]
    if absent:
        yield from (Awaited([each], surely=True) for each in absent)
    elif not starting:  # they may wait for a replacement, which has a deadline of its own
        yield Awaited(sorted([*members, *joining], key=lambda each: (not each.joins, each.rank)))


def _behind(members: list[Seen], elsewhere: Place | None) -> Iterator[Awaited]:
    """Of several that are equally far nobody knows who waits for whom, and one that still works may be the one."""
    if not members:
        return
    last = min(each.place for each in members)
    if elsewhere is not None and elsewhere < last:
        return  # all of ours wait for a worker of another node, and that node will say so
    ahead = (elsewhere is not None and elsewhere > last) or any(each.place > last for each in members)
    behind = sorted((each for each in members if each.place == last), key=lambda each: each.rank)
    yield Awaited(behind, surely=ahead)
