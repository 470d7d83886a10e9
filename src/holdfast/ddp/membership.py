"""Who takes part in a run that recovers live: numbered memberships, which the supervisor publishes and workers obey.

A worker that loses a peer only suspects; who is a member, the supervisor alone decides, since it alone knows who is
dead. Members are numbered as the ranks were when the workers started; a rank is a member's place among the present.
"""

import json
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # it is public

LIVE = "live"
FOREVER = timedelta(days=365)


def key(number: int) -> str:
    """Where a membership is published."""
    return f"membership/{number}"


def publish(store: Store, number: int, members: tuple[int, ...]) -> None:
    """Say who the members are from now on."""
    store.set(key(number), json.dumps(members))


class Watch(threading.Thread):
    """Hears of new memberships as soon as they are published, and tells."""

    def __init__(self, store: Store, heard: Callable[[int, tuple[int, ...]], None]) -> None:
        super().__init__(name="holdfast-membership", daemon=True)
        self._store, self._heard = store, heard
        self.current: tuple[int, tuple[int, ...]] = (0, ())
        self.start()

    @property
    def latest(self) -> int:
        """The number of the newest membership."""
        return self.current[0]

    def run(self) -> None:
        while True:
            following = key(self.latest + 1)
            try:
                self._store.wait([following], FOREVER)
                members = tuple(json.loads(self._store.get(following)))
            except (RuntimeError, ValueError):
                return  # the store is gone, and with it the run
            self.current = (self.latest + 1, members)  # at once: another thread reads it
            self._heard(*self.current)
