"""Priorities of processes."""

import os
import subprocess
import sys

LOWERS_AND_REGAINS = """
import os, threading, time
from holdfast import process

before = os.getpriority(os.PRIO_PROCESS, 0)
process.lower_priority()
lowered = os.getpriority(os.PRIO_PROCESS, 0)
threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
process.regain_priority()
threads = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}
print(before, lowered, *threads)
"""


def test_a_process_regains_the_priority_that_it_lowered_in_all_its_threads() -> None:
    done = subprocess.run([sys.executable, "-c", LOWERS_AND_REGAINS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    before, lowered, *after = map(int, done.stdout.split())
    assert before == os.getpriority(os.PRIO_PROCESS, 0)
    assert lowered in (before, 10)  # the same where it could not be raised again
    assert after == [before]
