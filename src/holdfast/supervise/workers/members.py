"""Who are the members of a run that recovers live, decided by what is seen of its workers. Pure.

A *seat* is one worker process, and no two ever have the same. A *number* is a member's place when none is lost: it goes
from a lost worker to the one that takes its place. Workers without a number wait in reserve: spares, replacements that
have just come up, and those that were put to sleep.

What the supervisor of a node reports of its workers to the one that decides who goes on. Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.distributed.membership import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What is seen of one worker that has not failed: whether it waits to be let in, and which membership it is in."""

    seat: int
    is_ready: bool = False
    membership: int | None = None  # none: it has yet to join


class Members:
    """The members of one attempt, from membership to membership; `wanted` is how many of them are to train."""

    def __init__(self, strategy: str, size: int) -> None:
        self.wanted = size
        self.current = Membership(0, tuple(range(size)))
        self._strategy, self._size = strategy, size
        self._seats = {number: number for number in range(size)}  # of the members, by number
        self._leaving: dict[int, int] = {}  # of those that are to fall asleep
        self._last = dict(self._seats)  # the number that each seat had last
        self._asleep: set[int] = set()  # seats

    def number(self, seat: int) -> int:
        """The number of a seat, now or last; its own if it never had one."""
        return self._last.get(seat, seat)

    def is_member(self, seat: int) -> bool:
        """Whether this seat is a member, or was told that it is to be one."""
        return seat in self._seats.values()

    def lost(self, present: Sequence[WorkerStatus]) -> list[int]:
        """The numbers of members of which nothing is seen any more."""
        seats = {each.seat for each in present}
        return [number for number, seat in self._seats.items() if seat not in seats]

    def numbers(self, seats: Collection[int]) -> list[int]:
        """The numbers of those of these seats that are members."""
        return sorted(number for number, seat in self._seats.items() if seat in seats)

    def follow(self, told: Membership) -> None:
        """Take over what somebody else has decided."""
        known = {**self._leaving, **self._seats}
        inside = {number: known[number] for number in told.members if number not in told.joining}
        self._leaving = {number: self._seats[number] for number in told.asleep}
        self._seats = {**inside, **told.joining}
        self._last |= {seat: number for number, seat in told.joining.items()}
        self._asleep = (self._asleep | {*self._leaving.values()}) - {*self._seats.values()}
        self.current = told

    def counts(self, seat: int) -> bool:
        """Whether this seat was told that it is a member, and did not leave in order since."""
        return seat in self._last and seat not in self._asleep

    def is_settled(self, present: Sequence[WorkerStatus]) -> bool:
        """Whether as many train as are wanted, together, and all others are asleep."""
        inside = [each for each in present if each.membership is not None]
        together = all(each.membership == self.current.number for each in inside)
        return together and len(inside) == len(self._seats) == self.wanted

    def next(self, present: Sequence[WorkerStatus], *, broken: bool = False) -> Membership | None:
        """The membership to publish now, if there is to be another; `broken`: members cannot reach each other."""
        seen = {each.seat: each for each in present}
        told = {**self._leaving, **self._seats}
        inside = {n: seat for n, seat in told.items() if seat in seen and seen[seat].membership is not None}
        if broken or any(seat not in seen for seat in self._seats.values()):
            return self._without_lost(inside, seen)  # who is not asleep yet stays for now
        if any(seen[seat].membership != self.current.number for seat in self._seats.values()):
            return None  # they still find together
        if len(inside) > len(self._seats):
            return None  # some have yet to fall asleep
        return self._resized(inside, seen)

    def _without_lost(self, inside: dict[int, int], seen: Mapping[int, WorkerStatus]) -> Membership | None:
        """Those that are left go on; where the step is replayed, not before the places of all lost ones are taken."""
        if self._strategy != "replay":
            return self._publish(inside, {}) if inside else None
        joining = self._seated(self._seats.keys() - inside.keys(), self._ready(inside, seen))
        return self._publish(inside, joining) if {*inside, *joining} == {*self._seats} else None

    def _resized(self, inside: dict[int, int], seen: Mapping[int, WorkerStatus]) -> Membership | None:
        """Nobody is lost: let workers in or put some to sleep, if there are to be more or fewer."""
        more = self.wanted - len(inside)
        if more < 0:
            asleep = sorted(inside)[more:]
            return self._publish({number: inside[number] for number in sorted(inside)[:more]}, {}, tuple(asleep))
        joining = self._seated(set(range(self._size)) - inside.keys(), self._ready(inside, seen)[:more])
        return self._publish(inside, joining) if joining else None

    def _ready(self, inside: Mapping[int, int], seen: Mapping[int, WorkerStatus]) -> list[int]:
        return [seat for seat, each in sorted(seen.items()) if each.is_ready and seat not in inside.values()]

    def _seated(self, free: set[int], ready: list[int]) -> dict[int, int]:
        """Numbers for those that are ready: the one that they had before, if it is free, else the lowest."""
        found: dict[int, int] = {}
        for seat in sorted(ready, key=lambda seat: self._last.get(seat) not in free):
            left = sorted(free - found.keys())
            if left:
                last = self._last.get(seat)
                found[last if last in left else left[0]] = seat
        return found

    def _publish(self, inside: dict[int, int], joining: dict[int, int], asleep: tuple[int, ...] = ()) -> Membership:
        members = tuple(sorted({**inside, **joining}))
        told = Membership(self.current.number + 1, members, joining, asleep)
        self.follow(told)
        return told


class MembersReport(NamedTuple):
    """The workers of one node, or of several.

    `broken`: some have waited for a membership for long. `ended`: some have nothing left to train. `goes_on`: all
    members are where the loss of a peer can be survived.
    """

    seen: tuple[WorkerStatus, ...] = ()
    broken: bool = False
    ended: bool = False
    goes_on: bool = True

    @property
    def inside(self) -> tuple[int, ...]:
        """The seats of those that are members, as far as they know."""
        return tuple(each.seat for each in self.seen if each.membership is not None)

    @property
    def ready(self) -> int:
        """How many wait to be let in."""
        return sum(each.is_ready for each in self.seen)

    def to_json(self) -> list[Any]:
        seen = [[each.seat, each.is_ready, each.membership] for each in self.seen]
        return [seen, self.broken, self.ended, self.goes_on]

    @classmethod
    def from_json(cls, said: list[Any]) -> "MembersReport":
        """The inverse."""
        seen = tuple(WorkerStatus(seat=seat, is_ready=ready, membership=number) for seat, ready, number in said[0])
        return cls(seen, *said[1:])


def together(reports: Iterable[MembersReport]) -> MembersReport:
    """The workers of all of them."""
    several = list(reports)
    return MembersReport(
        tuple(each for report in several for each in report.seen),
        any(report.broken for report in several),
        any(report.ended for report in several),
        all(report.goes_on for report in several),
    )
