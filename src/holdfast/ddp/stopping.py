"""How all ranks stop before the same window when one of them was asked to: preemption in order.

A rank that leaves its peers in a collective leaves them waiting, and a rank may be many windows ahead of another, where
a device works through what it was given. So a rank that hears of the wish says which boundary it comes to next, and goes
no further than that boundary until all have said so; the furthest of them is where everybody stops. Whoever is behind
can get there: the others have begun every collective up to it.

A thread listens for the wish, because a rank may hear of it while it waits for a peer in the middle of a window.
"""

import threading
from contextlib import suppress

from holdfast.ddp import preemption
from holdfast.ddp.world import Changed, World

WANTED = "stop-wanted"
NEXT = "stop-next"
STOP = "stop"
STOPPED = "stopped"
LOOK = 0.05  # seconds between two looks for the wish


class Stopping:
    """Whether and where this run stops before its end."""

    def __init__(self, world: World, start: int) -> None:
        self._world = world
        self._over = threading.Event()
        self.begin(start)

    def begin(self, start: int) -> None:
        """Before this window, with the peers that there are now: agree anew on where to stop, if asked to."""
        self._over.set()
        self._over = threading.Event()
        self._next = start  # the boundary that this rank comes to next
        self._stop: int | None = None
        self._turn = threading.Lock()  # to pass a boundary, or to say which comes next
        self._said = threading.Event()
        if self._world.size > 1:
            threading.Thread(target=self._listen, args=(self._over,), name="holdfast-stopping", daemon=True).start()

    def here(self, step: int) -> bool:
        """Whether all ranks stop before the window with this number, or could have before; asked at every boundary."""
        if self._world.size == 1:
            return preemption.requested.is_set()
        with self._turn:
            if not self._said.is_set():
                self._next = step + 1
                return False
        if self._stop is None:
            self._stop = int(self._world.hear(STOP))
        return self._stop <= step

    def meet(self) -> None:
        """Wait until rank 0 has saved: a rank that has gone may be the end of the others."""
        self._world.from_first(STOPPED, None if self._world.rank else "")

    def close(self) -> None:
        """Listen no longer: the loop has ended."""
        self._over.set()

    def _listen(self, over: threading.Event) -> None:
        with suppress(Changed):  # then it begins anew
            while not over.wait(LOOK):
                if preemption.requested.is_set() or self._world.is_told(WANTED):
                    self._agree()
                    return

    def _agree(self) -> None:
        world = self._world
        world.tell(WANTED, "")
        with self._turn:
            nearest = self._next
            self._said.set()
        world.tell(f"{NEXT}/{world.rank}", str(nearest))
        if world.rank == 0:
            world.tell(STOP, str(max(int(world.hear(f"{NEXT}/{rank}")) for rank in range(world.size))))
