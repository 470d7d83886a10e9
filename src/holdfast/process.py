"""Whether this worker was asked to stop in order. The signal only asks; the training loop answers at a boundary."""

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PREEMPTED = 75
"""The exit status of a worker that was asked to stop, saved, and may go on later (EX_TEMPFAIL)."""
IN_ORDER = (0, PREEMPTED)
"""How a worker exits that did what it was to do."""
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
"""What asks a process to stop."""


_PR_SET_PDEATHSIG = 1


class StopFlag:
    """A flag without a lock: a signal may come while the thread it interrupts holds any lock there is."""

    def __init__(self) -> None:
        self._made = False

    def set(self) -> None:
        """Ask."""
        self._made = True

    def is_set(self) -> bool:
        """Whether it was asked for."""
        return self._made


requested = StopFlag()
"""Set by SIGTERM in a worker; read at every step boundary."""


@contextmanager
def held_back() -> Iterator[None]:
    """Keep signals back while forking: a child meets them when it is ready, and never with its parent's handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """Be killed by the kernel when the thread that forked us ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlast() -> None:
    """Be a process that serves a worker: requests to stop are the worker's to answer, and we end with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
