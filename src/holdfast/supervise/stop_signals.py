"""How often a supervisor was asked to stop: SIGTERM and SIGINT, counted before torch is imported and until the verdict.

Imports nothing heavy: whoever listens first is the command line.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.process import SIGNALS


class Asked:
    """The count, and whether a request may interrupt what is being done."""

    def __init__(self) -> None:
        self.times = 0
        self.interruptible: Callable[[], bool] = lambda: False
        self._listening = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count requests from here on; within another call, its count goes on."""
        if self._listening:
            yield
            return
        self.times, self._listening = 0, True
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield
        finally:
            self._listening = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        self.times += 1
        if self.interruptible():
            raise StopRequested


class StopRequested(Exception):
    """A request came while nothing but waiting was done."""


asked = Asked()
"""This process's own."""
