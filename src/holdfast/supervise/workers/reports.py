"""What the supervisor of a node reports of its workers to the one that decides who goes on. Pure."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from holdfast.supervise.workers.members import Seen


class Report(NamedTuple):
    """The workers of one node, or of several.

    `broken`: some have waited for a membership for long. `ended`: some have nothing left to train. `goes_on`: all
    members are where the loss of a peer can be survived.
    """

    seen: tuple[Seen, ...] = ()
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
    def from_json(cls, said: list[Any]) -> "Report":
        """The inverse."""
        seen = tuple(Seen(seat=seat, is_ready=ready, membership=number) for seat, ready, number in said[0])
        return cls(seen, *said[1:])


def together(reports: Iterable[Report]) -> Report:
    """The workers of all of them."""
    several = list(reports)
    return Report(
        tuple(each for report in several for each in report.seen),
        any(report.broken for report in several),
        any(report.ended for report in several),
        all(report.goes_on for report in several),
    )
