"""Whose turn it is at a boundary: the training passes it, unless somebody has something to do there.

Other threads hear of a loss, of somebody who wants to join, or of the wish to stop, and say to the peers which boundary
this rank comes to next: they do so in their turn, while no boundary is passed.
"""

import sys
import threading

NEVER = sys.maxsize  # a boundary that does not come


class BoundaryGate:
    """The boundary that comes next, and who waits for the training there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """To be held by whoever reads or changes the others."""
        self.next = 0
        self.waiting: set[object] = set()

    def passes(self, step: int) -> bool:
        """Pass the boundary before this window, if nobody waits there."""
        with self.lock:
            if self.waiting:
                return False
            self.next = step + 1
            return True

    def wait(self, who: object) -> int:
        """From now on they wait for the training; the boundary that it comes to next."""
        with self.lock:
            self.waiting.add(who)
            return self.next

    def leave(self, who: object) -> None:
        """They wait no longer."""
        with self.lock:
            self.waiting.discard(who)
