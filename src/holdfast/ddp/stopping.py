"""How all ranks stop before the same window when one of them was asked to: preemption in order.

A rank that leaves its peers in a collective leaves them waiting. So rank 0 names a boundary that nobody can have
passed yet: a peer at that boundary has trained a window together with rank 0 since the boundary was named.
"""

from holdfast.ddp import preemption
from holdfast.ddp.world import World

STOP = "stop"
WANTED = "stop-wanted"
STOPPED = "stopped"
AHEAD = 2  # windows


class Stopping:
    """Whether and where this run stops before its end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._said = False

    def here(self, step: int) -> bool:
        """Whether all ranks stop before the window with this number."""
        if self._world.size == 1:
            return preemption.requested.is_set()
        if not self._said:
            self._say(step)
        return self._world.is_told(STOP) and int(self._world.hear(STOP)) == step

    def _say(self, step: int) -> None:
        first = self._world.rank == 0
        if preemption.requested.is_set() or (first and self._world.is_told(WANTED)):
            self._world.tell(*((STOP, str(step + AHEAD)) if first else (WANTED, "")))
            self._said = True

    def meet(self) -> None:
        """Wait until rank 0 has saved: a rank that has gone may be the end of the others."""
        self._world.from_first(STOPPED, None if self._world.rank else "")
