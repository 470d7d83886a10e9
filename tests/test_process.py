"""Priorities of processes."""

import os
import subprocess
import sys
from pathlib import Path

from holdfast import process

LOWERS_ITS_PRIORITY = """
import os, threading, time
from holdfast import process

process.lower_priority()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
time.sleep(60)
"""


def test_a_process_regains_the_priority_that_it_lowered_in_all_its_threads() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    command = [sys.executable, "-c", LOWERS_ITS_PRIORITY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert int(child.stdout.readline()) in (usual, 10)  # the same where it could not be raised again
        process.regain_priority(child.pid)
        threads = [int(thread.name) for thread in Path(f"/proc/{child.pid}/task").iterdir()]
        assert len(threads) == 2
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {usual}
        child.kill()
