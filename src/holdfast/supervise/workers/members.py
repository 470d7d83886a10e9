"""The members of a run that recovers live: who they are next, given the state of the workers. Pure.

A *seat* is one worker process; no two ever have the same. A *number* is a member's place when none is lost: it passes
from a lost worker to its replacement. Workers without a number wait in reserve: spares, new replacements, and workers
that `holdfast scale` put to sleep.

The supervisor of each node reports its workers to the node that decides.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.distributed.membership import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker that has not failed: whether it is ready to join, and the membership it is in (None: in reserve)."""

    seat: int
    is_ready: bool = False
    membership: int | None = None


class Members:
    """The members of one attempt, from membership to membership; `wanted` is the number that should train."""

    def __init__(self, strategy: str, size: int) -> None:
        self.wanted = size
        self.current = Membership(0, tuple(range(size)))
        self._strategy, self._size = strategy, size
        self._seats = {number: number for number in range(size)}  # of the members, by number
        self._leaving: dict[int, int] = {}  # of members that were told to sleep, by number
        self._last = dict(self._seats)  # last number of each seat
        self._asleep: set[int] = set()  # seats

    def number_of(self, seat: int) -> int:
        """Return the number of `seat`, now or last; the seat itself if it never had one."""
        return self._last.get(seat, seat)

    def is_member(self, seat: int) -> bool:
        """Return True if `seat` is a member, or was told to become one."""
        return seat in self._seats.values()

    def was_member(self, seat: int) -> bool:
        """Return True if `seat` was told to become a member, and was not put to sleep since."""
        return seat in self._last and seat not in self._asleep

    def lost(self, workers: Sequence[WorkerStatus]) -> list[int]:
        """Return the numbers of members that are not among `workers`."""
        seats = {worker.seat for worker in workers}
        return [number for number, seat in self._seats.items() if seat not in seats]

    def numbers_of(self, seats: Collection[int]) -> list[int]:
        """Return the numbers of those `seats` that are members."""
        return sorted(number for number, seat in self._seats.items() if seat in seats)

    def adopt(self, membership: Membership) -> None:
        """Make `membership` the current one."""
        known = {**self._leaving, **self._seats}
        inside = {number: known[number] for number in membership.members if number not in membership.joining}
        self._leaving = {number: self._seats[number] for number in membership.asleep}
        self._seats = {**inside, **membership.joining}
        self._last |= {seat: number for number, seat in membership.joining.items()}
        self._asleep = (self._asleep | {*self._leaving.values()}) - {*self._seats.values()}
        self.current = membership

    def is_complete(self, workers: Sequence[WorkerStatus]) -> bool:
        """Return True if exactly the wanted number of workers train together, and all others sleep."""
        inside = [worker for worker in workers if worker.membership is not None]
        together = all(worker.membership == self.current.number for worker in inside)
        return together and len(inside) == len(self._seats) == self.wanted

    def next(self, workers: Sequence[WorkerStatus], *, broken: bool = False) -> Membership | None:
        """Adopt and return the next membership, if there is to be one; `broken`: members cannot reach each other."""
        present = {worker.seat: worker for worker in workers}
        known = {**self._leaving, **self._seats}
        inside = {n: seat for n, seat in known.items() if seat in present and present[seat].membership is not None}
        if broken or any(seat not in present for seat in self._seats.values()):
            return self._without_lost(inside, present)  # a worker that is not asleep yet stays for now
        if any(present[seat].membership != self.current.number for seat in self._seats.values()):
            return None  # they have not all joined the current membership
        if len(inside) > len(self._seats):
            return None  # some have yet to fall asleep
        return self._resized(inside, present)

    def _without_lost(self, inside: dict[int, int], present: Mapping[int, WorkerStatus]) -> Membership | None:
        """Continue with the members that are left; to replay a step, all lost ones must be replaced first."""
        if self._strategy != "replay":
            return self._publish(inside, {}) if inside else None
        joining = self._seated(self._seats.keys() - inside.keys(), self._ready(inside, present))
        return self._publish(inside, joining) if {*inside, *joining} == {*self._seats} else None

    def _resized(self, inside: dict[int, int], present: Mapping[int, WorkerStatus]) -> Membership | None:
        """Let workers join, or put some to sleep, if more or fewer are wanted than train."""
        more = self.wanted - len(inside)
        if more < 0:
            asleep = sorted(inside)[more:]
            return self._publish({number: inside[number] for number in sorted(inside)[:more]}, {}, tuple(asleep))
        joining = self._seated(set(range(self._size)) - inside.keys(), self._ready(inside, present)[:more])
        return self._publish(inside, joining) if joining else None

    def _ready(self, inside: Mapping[int, int], present: Mapping[int, WorkerStatus]) -> list[int]:
        return [seat for seat, worker in sorted(present.items()) if worker.is_ready and seat not in inside.values()]

    def _seated(self, free: set[int], ready: list[int]) -> dict[int, int]:
        """Give each ready seat a free number: its last one if that is free, otherwise the lowest."""
        seats: dict[int, int] = {}
        for seat in sorted(ready, key=lambda seat: self._last.get(seat) not in free):
            left = sorted(free - seats.keys())
            if left:
                last = self._last.get(seat)
                seats[last if last in left else left[0]] = seat
        return seats

    def _publish(self, inside: dict[int, int], joining: dict[int, int], asleep: tuple[int, ...] = ()) -> Membership:
        membership = Membership(self.current.number + 1, tuple(sorted({**inside, **joining})), joining, asleep)
        self.adopt(membership)
        return membership


class MembersReport(NamedTuple):
    """The workers of one node, or of several.

    `broken`: some have waited for a membership for long. `ended`: some have nothing left to train. `goes_on`: all
    members are at a point where they can survive the loss of a peer.
    """

    seen: tuple[WorkerStatus, ...] = ()
    broken: bool = False
    ended: bool = False
    goes_on: bool = True

    @property
    def inside(self) -> tuple[int, ...]:
        """The seats of workers that are in a membership."""
        return tuple(worker.seat for worker in self.seen if worker.membership is not None)

    @property
    def ready(self) -> int:
        """The number of workers that are ready to join."""
        return sum(worker.is_ready for worker in self.seen)

    def to_json(self) -> list[Any]:
        seen = [[worker.seat, worker.is_ready, worker.membership] for worker in self.seen]
        return [seen, self.broken, self.ended, self.goes_on]

    @classmethod
    def from_json(cls, data: list[Any]) -> "MembersReport":
        seen = tuple(WorkerStatus(seat=seat, is_ready=ready, membership=number) for seat, ready, number in data[0])
        return cls(seen, *data[1:])


def merge_reports(reports: Iterable[MembersReport]) -> MembersReport:
    """Return one report for the workers of all nodes."""
    all_reports = list(reports)
    return MembersReport(
        tuple(worker for report in all_reports for worker in report.seen),
        any(report.broken for report in all_reports),
        any(report.ended for report in all_reports),
        all(report.goes_on for report in all_reports),
    )
