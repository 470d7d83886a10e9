"""What the kernel says of workers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from holdfast.progress import Phase, Progress
from holdfast.supervise.workers.process import Running, leaving

EXIT = {"x86_64": 60, "aarch64": 93}  # the system call that ends one thread, not the process
DEADLINE = 30.0
NOBODY = 2**22 + 1  # no process has a number as high

FIRST_THREAD_ENDS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
ctypes.CDLL(None).syscall(int(sys.argv[1]), 7)
"""


@pytest.fixture
def half_gone() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", FIRST_THREAD_ENDS, str(EXIT[os.uname().machine])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process
        process.kill()


def test_of_a_process_whose_first_thread_has_gone_the_status_is_known_before_it_can_be_waited_for(
    half_gone: subprocess.Popen[bytes],
) -> None:
    deadline = time.monotonic() + DEADLINE
    while (status := leaving(half_gone.pid)) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert status == 7
    assert half_gone.poll() is None


def test_of_a_process_that_runs_or_never_was_nothing_is_known() -> None:
    assert leaving(os.getpid()) is None
    assert leaving(NOBODY) is None


def test_a_worker_that_dies_after_it_was_looked_at_is_dead_from_the_next_look_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else of two that die at once one could be lost, and the other neither lost nor in its loop."""
    dies = iter([False, True])
    monkeypatch.setattr(Running, "_has_ended", lambda _: next(dies))
    worker = object.__new__(Running)
    worker.task = SimpleNamespace(progress=Progress())  # type: ignore[assignment]
    worker.task.progress.enter(Phase.TRAINING)
    worker.exit, worker.hung = None, ""
    worker._process = SimpleNamespace(exitcode=-9)  # type: ignore[assignment]
    for is_dead in (False, True):
        worker.look()
        for _ in range(2):
            assert worker.has_fallen is is_dead
            assert worker.has_ended is is_dead
            assert worker.goes_on is not is_dead
