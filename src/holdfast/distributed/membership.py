"""Who takes part in a run that recovers live: numbered memberships, which the supervisor publishes and workers obey.

A worker that loses a peer only suspects; who is a member, the supervisor alone decides, since it alone knows who is
dead. Members are numbered as the ranks were when the workers started; a rank is a member's place among the present.
"""

import json
import threading
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # it is public

LIVE = "live"
FOREVER = timedelta(days=365)


def key(number: int) -> str:
    """Where a membership is published."""
    return f"membership/{number}"


class Membership(NamedTuple):
    """Who is a member; `joining` has the worker processes that come in as some of them, whoever was it before.

    Those in `asleep` were members, and leave at a boundary: nothing of theirs is lost.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    joining: Mapping[int, int] = {}  # the seat of the process, by the number that it has from now on
    asleep: tuple[int, ...] = ()

    def has_lost(self, members: Collection[int]) -> bool:
        """Whether one of these is a member no longer, and does not sleep."""
        return not set(members) <= (set(self.members) - set(self.joining)) | set(self.asleep)

    def number_of(self, seat: int) -> int | None:
        """The number under which this worker process comes in, if it does."""
        return next((number for number, each in self.joining.items() if each == seat), None)

    def to_json(self) -> list[Any]:
        return [self.number, self.members, list(self.joining.items()), self.asleep]

    @classmethod
    def from_json(cls, said: list[Any]) -> "Membership":
        """The inverse."""
        number, members, joining, asleep = said
        return cls(number, tuple(members), dict(joining), tuple(asleep))


def publish(store: Store, membership: Membership) -> None:
    """Say who the members are from now on."""
    store.set(key(membership.number), json.dumps(membership.to_json()))


class MembershipWatch(threading.Thread):
    """Hears of new memberships as soon as they are published, and tells."""

    def __init__(self, store: Store, heard: Callable[[Membership], None]) -> None:
        super().__init__(name="holdfast-membership", daemon=True)
        self._store, self._heard = store, heard
        self.current = Membership()
        self.start()

    def run(self) -> None:
        while True:
            number = self.current.number + 1
            try:
                self._store.wait([key(number)], FOREVER)
                found = Membership.from_json(json.loads(self._store.get(key(number))))
            except (RuntimeError, ValueError):
                return  # the store is gone, and with it the run
            self.current = found  # at once: others read it
            self._heard(self.current)
