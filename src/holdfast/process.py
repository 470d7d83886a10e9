"""Stop signals and exit statuses of worker processes. A signal only sets a flag; training stops at a step boundary."""

import ctypes
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PREEMPTED = 75
"""The exit status of a worker that saved and stopped after a signal; the run can be continued (EX_TEMPFAIL)."""
IN_ORDER = (0, PREEMPTED)
"""The exit statuses of a worker that has not failed: it finished, or it was preempted."""
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
"""The signals that ask a process to stop."""


class StopFlag:
    """A flag that a signal handler can set safely. It has no lock, because the interrupted thread may hold any lock."""

    def __init__(self) -> None:
        self._made = False

    def set(self) -> None:
        self._made = True

    def is_set(self) -> bool:
        return self._made


requested = StopFlag()
"""Set by SIGTERM in a worker; read at every step boundary."""


@contextmanager
def held_back() -> Iterator[None]:
    """Block stop signals inside this context, so that a child forked in it never runs its parent's handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def set_title(title: str) -> None:
    """Set the name under which `ps` and `top` show this process, cut to 15 bytes (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(15, title.encode())  # 15 is PR_SET_NAME


def outlast() -> None:
    """Ignore stop signals in a helper process of a worker; the worker itself handles them and ends its helpers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
