"""Gloo groups that lose members: nothing of a lost group stays behind."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "support" / "lose_peers.py"


def test_threads_and_open_files_do_not_grow_with_the_number_of_lost_peers() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "8"], capture_output=True, text=True, timeout=120, check=True)
    threads, files = zip(*json.loads(done.stdout), strict=True)
    assert max(threads[4:]) <= max(threads[:4]), threads
    assert max(files[4:]) <= max(files[:4]), files
