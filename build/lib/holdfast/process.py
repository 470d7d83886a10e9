"""Stop signals and exit statuses of worker processes. A signal only sets a flag; training stops at a step boundary."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREEMPTED = 75  # the exit status of a worker that saved and stopped after a signal, to be continued (EX_TEMPFAIL)
IN_ORDER = (0, PREEMPTED)  # the exit statuses of a worker that has not failed: it finished, or it was preempted
LOWER = 10  # the nice value of a lower priority
SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})  # the signals that ask a process to stop


class StopFlag:
    """A flag that a signal handler can set safely. It has no lock, because the interrupted thread may hold any lock."""

    def __init__(self) -> None:
        self._made = False

    def set(self) -> None:
        self._made = True

    def is_set(self) -> bool:
        return self._made


requested = StopFlag()  # set by SIGTERM in a worker; read at every step boundary


@contextmanager
def held_back() -> Iterator[None]:
    """Block stop signals inside this context, so that a process forked in it cannot run the handlers of its parent."""
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


def lower_priority() -> None:
    """Lower the CPU priority of this process, if the system would allow `regain_priority` to raise it again."""
    is_allowed: list[bool] = []

    def try_out() -> None:  # in a thread, which on Linux has a priority of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, LOWER)
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getpid()))
            is_allowed.append(True)

    thread = threading.Thread(target=try_out)
    thread.start()
    thread.join()
    if is_allowed:
        os.setpriority(os.PRIO_PROCESS, 0, LOWER)


def regain_priority(child: int) -> None:
    """Raise the priority of all threads of the process `child` to the priority of this process, its parent."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):  # it has ended meanwhile
        for thread in Path(f"/proc/{child}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), usual)


def outlast() -> None:
    """Ignore stop signals in a helper process of a worker; the worker itself handles them and ends its helpers."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
