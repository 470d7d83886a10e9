"""What the kernel says of workers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from holdfast.supervise.processes import leaving

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
