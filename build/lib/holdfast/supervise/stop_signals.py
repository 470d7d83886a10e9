"""The stop requests to a supervisor: SIGTERM and SIGINT, counted from before torch is imported until the run ends.

This module imports nothing heavy, so that the command line can count signals from the beginning.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.process import SIGNALS


class StopRequested(Exception):
    """Raised if a stop signal arrives in a block of `StopSignals.interrupting`."""


class StopSignals:
    """A counter of the stop signals (SIGTERM and SIGINT) that this process has received."""

    def __init__(self) -> None:
        self.count = 0
        self._is_listening = self._is_interruptible = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count stop signals in the `with` block. A nested block continues the count of the outer block."""
        if self._is_listening:
            yield
            return
        self.count, self._is_listening = 0, True
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            if self._is_listening:
                for number, handler in before.items():
                    signal.signal(number, handler)
            self._is_listening = False

    def ignore(self) -> None:
        """Ignore stop signals from now on, so that they do not change the exit status of a finished run."""
        self._is_listening = False
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise StopRequested in the `with` block when a stop signal arrives."""
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
