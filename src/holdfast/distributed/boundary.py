"""The gate at a step boundary: training passes it unless another thread has asked it to stop there.

Other threads learn of a loss, of a worker that wants to join, or of a request to stop, and post to the peers which
boundary this rank comes to next. They do so under the gate's lock, while no boundary is passed.
"""

import sys
import threading

NEVER = sys.maxsize  # a boundary that is never reached


class BoundaryGate:
    """The next boundary, and who waits for the training there. Hold `lock` to read or change `next` and `waiting`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.next = 0
        self.waiting: set[object] = set()

    def passes(self, step: int) -> bool:
        """Pass the boundary before `step`; return False if someone waits there."""
        with self.lock:
            if self.waiting:
                return False
            self.next = step + 1
            return True

    def wait(self, owner: object) -> int:
        """Make the training stop for `owner`; return the boundary that it comes to next."""
        with self.lock:
            self.waiting.add(owner)
            return self.next

    def leave(self, owner: object) -> None:
        """Let the training pass as far as `owner` is concerned."""
        with self.lock:
            self.waiting.discard(owner)
