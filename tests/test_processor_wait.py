"""The time that a thread waited for a processor is counted, and other waits are not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.processor_wait import COUNTER, ProcessorWait

SPINS = "while True: pass"
is_counted = pytest.mark.skipif(not COUNTER.exists(), reason="this kernel does not count how long threads wait")


def test_the_second_number_of_the_kernel_is_the_wait_in_nanoseconds(tmp_path: Path) -> None:
    counter = tmp_path / "schedstat"
    counter.write_text("120 2500000000 7\n")
    wait = ProcessorWait(counter)
    assert wait.seconds() == 2.5
    counter.write_text("120 2600000000 8\n")
    assert wait.seconds() == 2.6


def test_nothing_is_counted_where_the_kernel_does_not_count(tmp_path: Path) -> None:
    assert ProcessorWait(tmp_path / "absent").seconds() == 0.0


@is_counted
def test_a_thread_that_shares_its_processor_has_waited_for_it() -> None:
    usual = os.sched_getaffinity(0)
    wait = ProcessorWait()
    os.sched_setaffinity(0, {min(usual)})
    try:
        with subprocess.Popen([sys.executable, "-c", SPINS]) as other:  # on the same processor
            before, deadline = wait.seconds(), time.monotonic() + 30
            while wait.seconds() - before < 0.05:
                assert time.monotonic() < deadline
            other.kill()
    finally:
        os.sched_setaffinity(0, usual)


@is_counted
def test_a_thread_that_sleeps_has_not_waited_for_a_processor() -> None:
    wait = ProcessorWait()
    least = 1.0
    for _ in range(20):  # on a busy machine it may wait when it wakes up
        before = wait.seconds()
        time.sleep(0.05)
        least = min(least, wait.seconds() - before)
    assert least < 0.025


@is_counted
def test_the_counter_is_closed_with_its_object() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    waits = [ProcessorWait() for _ in range(5)]
    assert open_files() == before + 5
    del waits
    assert open_files() == before
