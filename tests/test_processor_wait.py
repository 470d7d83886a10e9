"""The time that a thread waited for a processor is counted, and other waits are not."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from holdfast.processor_wait import CAREFUL, COUNTER, OwnWaits, ProcessorWait

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


class Steps:
    """Steps of 10 ms whose thread waits for given times, before its own part of a step and in it."""

    def __init__(self) -> None:
        self.waited, self.reads = 0.0, 0
        self.waits = OwnWaits(cast(ProcessorWait, self))

    def seconds(self) -> float:
        self.reads += 1
        return self.waited

    def step(self, before: float, inside: float) -> float:
        self.waited += before
        self.waits.begin()
        self.waited += inside
        return self.waits.end(0.01 + inside)


def test_only_waits_in_the_own_part_of_a_step_count() -> None:
    steps = Steps()
    steps.step(0.0, 0.02)  # the first one after a pause is not measured from its beginning
    assert [steps.step(0.05, 0.02) for _ in range(3)] == pytest.approx([0.02] * 3)
    assert steps.step(0.05, 0.0) == 0.0


def test_a_thread_has_not_waited_for_longer_than_its_part_of_the_step_took() -> None:
    steps = Steps()
    steps.step(0.0, 0.02)
    steps.waits.begin()
    steps.waited += 5.0  # between the reading of the clock and that of the counter
    assert steps.waits.end(0.01) == 0.01


def test_the_counter_is_read_before_a_step_only_while_the_thread_waits() -> None:
    steps = Steps()
    for _ in range(100):
        assert steps.step(0.0, 0.0001) == 0.0
    assert steps.reads == 100
    steps.step(0.0, 0.02)
    for _ in range(CAREFUL):
        assert steps.step(0.0, 0.0001) == pytest.approx(0.0001)
    assert steps.reads == 101 + 2 * CAREFUL
    assert steps.step(0.0, 0.0001) == 0.0


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
