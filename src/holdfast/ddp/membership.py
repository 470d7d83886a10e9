"""Who takes part in a run that recovers live: numbered memberships, which the supervisor publishes and workers obey.

A worker that loses a peer only suspects; who is a member, the supervisor alone decides, since it alone knows who is
dead. Members are numbered as the ranks were when the workers started; a rank is a member's place among the present.
"""

import json
import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]  # it is public

LIVE = "live"
FOREVER = timedelta(days=365)


def key(number: int) -> str:
    """Where a membership is published."""
    return f"membership/{number}"


class Membership(NamedTuple):
    """Who is a member; those in `joining` have just started, whoever had their number before."""

    number: int = 0
    members: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()

    def has_lost(self, members: Collection[int]) -> bool:
        """Whether one of these is a member no longer."""
        return not set(members) <= set(self.members) - set(self.joining)


def publish(store: Store, membership: Membership) -> None:
    """Say who the members are from now on."""
    store.set(key(membership.number), json.dumps([membership.members, membership.joining]))


class Watch(threading.Thread):
    """Hears of new memberships as soon as they are published, and tells."""

    def __init__(self, store: Store, heard: Callable[[Membership], None]) -> None:
        super().__init__(name="holdfast-membership", daemon=True)
        self._store, self._heard = store, heard
        self.current = Membership()
        self.start()

    @property
    def latest(self) -> int:
        """The number of the newest membership."""
        return self.current.number

    def run(self) -> None:
        while True:
            following = key(self.latest + 1)
            try:
                self._store.wait([following], FOREVER)
                members, joining = json.loads(self._store.get(following))
            except (RuntimeError, ValueError):
                return  # the store is gone, and with it the run
            self.current = Membership(self.latest + 1, tuple(members), tuple(joining))  # at once: others read it
            self._heard(self.current)
