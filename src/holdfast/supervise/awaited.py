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

    seat: int  # which worker of this node it is: no two of an attempt have the same
    boundaries: int = 0
    posted: int = 0
    moved: int = 0
    evaluated: int = 0
    phase: Phase = Phase.STARTING
    stopped: bool = False
    asleep: bool = True  # it neither computes, nor stands in line for a processor, nor waits for a disk
    is_member: bool = True  # others train with it, or are about to; else it is in reserve

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
    """Those that may keep the others, as far as places and phases tell; nobody waits for one that is ready in reserve."""
    members = [each for each in workers if each.is_member and each.phase is not Phase.ENDED]
    coming = [each for each in workers if not each.is_member and each.phase not in (Phase.JOINING, Phase.ENDED)]
    found = [Awaited([each]) for each in coming]
    if any(each.phase is Phase.RECOVERING for each in members):
        return [*found, *_finding_together(members, bool(coming))]
    return [*found, *_behind([each for each in members if each.phase is not Phase.JOINING], elsewhere)]


def _finding_together(members: list[Seen], some_come: bool) -> Iterator[Awaited]:
    """Members were lost, or others join: whoever is not there is waited for, however far it is."""
    there = (Phase.RECOVERING, Phase.JOINING)
    absent = [each for each in members if each.phase not in there]
    if absent:
        yield from (Awaited([each], surely=True) for each in absent)
    elif not some_come:  # they may wait for a replacement, which has a deadline of its own
        yield Awaited(sorted(members, key=lambda each: (each.phase is Phase.RECOVERING, each.seat)))


def _behind(members: list[Seen], elsewhere: Place | None) -> Iterator[Awaited]:
    """Of several that are equally far nobody knows who waits for whom, and one that still works may be the one."""
    if not members:
        return
    last = min(each.place for each in members)
    if elsewhere is not None and elsewhere < last:
        return  # all of ours wait for a worker of another node, and that node will say so
    ahead = (elsewhere is not None and elsewhere > last) or any(each.place > last for each in members)
    behind = sorted((each for each in members if each.place == last), key=lambda each: each.seat)
    yield Awaited(behind, surely=ahead)
