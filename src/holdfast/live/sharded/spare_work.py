"""Work in small pieces that is done while collectives wait for other ranks, because its result is needed only later."""

from collections import deque
from collections.abc import Callable, Iterable


class SpareWork:
    """Pieces of work that are still to be done, in order."""

    def __init__(self) -> None:
        self._pieces: deque[Callable[[], None]] = deque()

    def add(self, pieces: Iterable[Callable[[], None]]) -> None:
        """Add `pieces` after all others."""
        self._pieces.extend(pieces)

    def do_until(self, is_over: Callable[[], bool]) -> None:
        """Do pieces until `is_over()` or until none is left."""
        while self._pieces and not is_over():
            self._pieces.popleft()()

    def finish(self) -> None:
        """Do all pieces that are left."""
        while self._pieces:
            self._pieces.popleft()()
