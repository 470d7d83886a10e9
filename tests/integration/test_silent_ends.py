"""A process that hangs at its end, or after a stop signal, is given up after a deadline, and its stack is kept."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor_process import Command, StartCommand, wait_until

SOON = "from holdfast.supervise import hang_detection; hang_detection.LEAST = hang_detection.STOP_WITHIN = 2.0"
HANGS_AT_ITS_END = """
import os, threading
import torch

optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
optimizer.step()
if os.environ["RANK"] == "0" and os.environ["HOLDFAST_ATTEMPT"] == "1":
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # waits for ever
"""
IGNORES_THE_SIGNAL = """
import sys, time
import torch

optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
while True:
    optimizer.step()
    print("stepped", flush=True)
    time.sleep(0.1)
"""


Run = Callable[..., Command]


@pytest.fixture
def run(start_command: StartCommand, tmp_path: Path) -> Run:
    """A function that starts a run of a script, with short deadlines, whose output and errors are together."""

    def start(script: str, *options: str) -> Command:
        (tmp_path / "script.py").write_text(script)
        arguments = ("run", "--workers", "2", *options, "--out", tmp_path / "out", tmp_path / "script.py")
        return start_command(*arguments, before=SOON, together=True)

    return start


def named_log(output: str, folder: Path) -> str:
    """Return the text of the log that a message names as the place of stacks."""
    match = re.search(r"stacks of \w+ threads(?: are in|:) (logs/[\w./-]+\.err)", output)
    assert match, output
    return (folder / "out" / match[1]).read_text()


def test_a_process_that_is_silent_after_its_peers_have_ended_is_found_and_started_again(
    run: Run, tmp_path: Path
) -> None:
    hanging = run(HANGS_AT_ITS_END)
    assert hanging.wait() == 0, hanging.stdout
    output = hanging.stdout
    assert re.search(r"rank 0 \(pid \d+\) neither computed nor ended after its peers had ended for", output), output
    assert "script.py" in named_log(output, tmp_path)
    assert "completed after 2 attempts" in output


def test_workers_that_do_not_stop_after_a_signal_are_killed_after_a_deadline(run: Run, tmp_path: Path) -> None:
    deaf = run(IGNORES_THE_SIGNAL)
    log = tmp_path / "out" / "logs" / "attempt-0001" / "rank-0.out"
    wait_until(lambda: log.exists() and "stepped" in log.read_text(), "a step")
    deaf.signal(signal.SIGTERM)
    assert deaf.wait() == 75, deaf.stdout
    output = deaf.stdout
    assert "ranks 0, 1 did not stop and made no progress after the signal" in output, output
    assert "script.py" in named_log(output, tmp_path)


def test_no_stacks_are_promised_if_the_worker_prints_none(run: Run) -> None:
    script = "import faulthandler\nfaulthandler.disable()\n" + HANGS_AT_ITS_END
    hanging = run(script, "--max-restarts", "0")
    assert hanging.wait() != 0
    assert "after its peers had ended" in hanging.stdout
    assert "stacks of" not in hanging.stdout
