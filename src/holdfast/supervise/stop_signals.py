"""The requests to stop a supervisor: SIGTERM and SIGINT, counted from before torch is imported until the verdict.

Imports nothing heavy, because the command line listens first.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.process import SIGNALS


class StopRequested(Exception):
    """A request came while the supervisor did nothing but wait."""


class StopSignals:
    """The number of stop signals received so far."""

    def __init__(self) -> None:
        self.count = 0
        self._is_listening = self._is_interruptible = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count signals from here on; a nested call continues the count."""
        if self._is_listening:
            yield
            return
        self.count, self._is_listening = 0, True
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            self._is_listening = False
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise StopRequested in this block when a signal comes."""
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self._is_interruptible:
            raise StopRequested


stop_signals = StopSignals()  # of this process
