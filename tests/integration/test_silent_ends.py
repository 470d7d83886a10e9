"""A process that hangs at its end, or after a stop signal, is given up after a deadline, and its stack is kept."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from supervisor_process import wait_until

SOON = """
import sys
from holdfast.supervise import hang_detection
hang_detection.LEAST = hang_detection.STOP_WITHIN = 2.0
from holdfast.cli import main
sys.exit(main())
"""
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


@contextmanager
def running(folder: Path, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-c", SOON, "run", "--workers", "2", *options]
    command += ["--out", str(folder / "out"), str(folder / "script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def named_log(output: str, folder: Path) -> str:
    """Return the text of the log that a message names as the place of stacks."""
    match = re.search(r"stacks of \w+ threads(?: are in|:) (logs/[\w./-]+\.err)", output)
    assert match, output
    return (folder / "out" / match[1]).read_text()


def test_a_process_that_is_silent_after_its_peers_have_ended_is_found_and_started_again(tmp_path: Path) -> None:
    with running(tmp_path, HANGS_AT_ITS_END) as run:
        output, _ = run.communicate(timeout=120)
    assert re.search(r"rank 0 \(pid \d+\) neither computed nor ended after its peers had ended for", output), output
    assert "script.py" in named_log(output, tmp_path)
    assert "completed after 2 attempts" in output
    assert run.returncode == 0


def test_workers_that_do_not_stop_after_a_signal_are_killed_after_a_deadline(tmp_path: Path) -> None:
    with running(tmp_path, IGNORES_THE_SIGNAL) as run:
        log = tmp_path / "out" / "logs" / "attempt-0001" / "rank-0.out"
        wait_until(lambda: log.exists() and "stepped" in log.read_text(), "a step")
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=120)
    assert "ranks 0, 1 did not stop and made no progress after the signal" in output, output
    assert "script.py" in named_log(output, tmp_path)
    assert run.returncode == 75, output


def test_no_stacks_are_promised_if_the_worker_prints_none(tmp_path: Path) -> None:
    script = "import faulthandler\nfaulthandler.disable()\n" + HANGS_AT_ITS_END
    with running(tmp_path, script, "--max-restarts", "0") as run:
        output, _ = run.communicate(timeout=120)
    assert "after its peers had ended" in output
    assert "stacks of" not in output
