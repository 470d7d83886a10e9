"""Gloo groups that lose members: nothing of a lost group stays behind."""

import json

from supervisor_process import SUPPORT, StartCommand

SCRIPT = SUPPORT / "lose_peers.py"


def test_threads_and_open_files_do_not_grow_with_the_number_of_lost_peers(start_command: StartCommand) -> None:
    done = start_command(8, instead=SCRIPT.read_text())
    assert done.wait() == 0, done.stderr
    threads, files = zip(*json.loads(done.stdout), strict=True)
    assert max(threads[4:]) <= max(threads[:4]), threads
    assert max(files[4:]) <= max(files[:4]), files
