"""The state of a worker process, as the kernel reports it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from holdfast.progress import Phase, Progress
from holdfast.supervise.workers.process import WorkerProcess, dying_status, innermost_call

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


def test_the_status_of_a_dying_process_is_known_before_it_can_be_waited_for(
    half_gone: subprocess.Popen[bytes],
) -> None:
    deadline = time.monotonic() + DEADLINE
    while (status := dying_status(half_gone.pid)) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert status == 7
    assert half_gone.poll() is None


def test_a_process_that_runs_or_never_existed_has_no_dying_status() -> None:
    assert dying_status(os.getpid()) is None
    assert dying_status(NOBODY) is None


def test_a_worker_that_dies_after_a_poll_is_dead_from_the_next_poll_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, of two that die together, one could be lost and the other neither lost nor in its loop."""
    dies = iter([False, True])
    monkeypatch.setattr(WorkerProcess, "_has_exited", lambda _: next(dies))
    worker = object.__new__(WorkerProcess)
    worker.task = SimpleNamespace(progress=Progress())  # type: ignore[assignment]
    worker.task.progress.phase = Phase.TRAINING
    worker.exit, worker.hung = None, ""
    worker._process = SimpleNamespace(exitcode=-9)  # type: ignore[assignment]
    for is_dead in (False, True):
        worker.poll()
        for _ in range(2):
            assert worker.has_failed is is_dead
            assert worker.has_finished is is_dead
            assert worker.can_lose_peers is not is_dead


STACK = """Current thread 0x0000ffff (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 12 in prepare
  File "/home/me/train.py", line 30 in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_innermost_line_of_the_script_and_the_call_in_it_are_named() -> None:
    assert (
        innermost_call(STACK, "/home/me/train.py") == " (train.py:12, which called barrier in distributed_c10d.py:5356)"
    )


def test_without_a_line_of_the_script_the_innermost_call_is_named() -> None:
    assert innermost_call(STACK, "/home/me/other.py") == " (barrier in distributed_c10d.py:5356)"


def test_a_worker_that_did_not_answer_has_no_place() -> None:
    assert innermost_call("", "/home/me/train.py") == ""
