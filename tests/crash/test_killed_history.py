"""A history whose writer is killed: what was flushed is there, and at most one line is torn."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast.events import Detect
from holdfast.history.log import History, HistoryWriter, read_history

# Flushes one long event after another, telling each on stdout once its flush has returned.
WRITE_FOR_EVER = """
import sys
from pathlib import Path
from holdfast.events import Detect
from holdfast.history.log import HistoryWriter

history = HistoryWriter(Path(sys.argv[1]), "rank-0")
step = 0
while True:
    history.append(Detect(1, 0, 0, "error", "x" * 100_000, step=step))
    history.flush()
    print(step, flush=True)
    step += 1
"""

# Writes a part of the third event's line and dies there, as a write that crosses a page can.
DIE_INSIDE_A_WRITE = """
import os, signal, sys
from pathlib import Path
import holdfast.history.log as module
from holdfast.events import Detect

def write_a_part_and_die(file, data):
    file.write(data[: int(sys.argv[2])])
    os.kill(os.getpid(), signal.SIGKILL)

history = module.HistoryWriter(Path(sys.argv[1]), "rank-0")
for step in range(2):
    history.append(Detect(1, 0, 0, "error", "", step=step))
    history.flush()
module._write_all = write_a_part_and_die
history.append(Detect(1, 0, 0, "error", "", step=2))
history.flush()
"""


def steps(history: History) -> list[object]:
    return [event.what.step for event in history.events if isinstance(event.what, Detect)]


def test_every_flushed_event_outlives_a_kill_and_the_file_can_be_continued(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")  # noqa: T201  # shown when the test fails
    rng = random.Random(seed)
    for round_ in range(5):
        folder = tmp_path / str(round_)
        flushed = _kill_after(folder, rng.randint(1, 30), rng.random() / 500)
        before = read_history(folder)
        assert steps(before)[: len(flushed)] == flushed
        assert len(steps(before)) <= len(flushed) + 1  # one may have been flushed and not yet told
        assert len(before.torn) <= 1
        with HistoryWriter(folder, "rank-0") as history:
            history.append(Detect(1, 0, 0, "error", "after", step=7))
        assert steps(read_history(folder)) == [*steps(before), 7]


def _kill_after(folder: Path, told: int, delay: float) -> list[int]:
    """Kill a writer some time after it told of so many events; return those it told of."""
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        deadline = threading.Timer(60, child.kill)  # a writer that hangs ends here, and told too little
        deadline.start()
        lines = [child.stdout.readline() for _ in range(told)]
        try:
            child.wait(timeout=delay)  # the moment of the kill: chosen by the seed, nothing depends on it
        except subprocess.TimeoutExpired:
            child.kill()
        lines += child.stdout.readlines()
        deadline.cancel()
    assert child.returncode == -signal.SIGKILL
    assert "" not in lines
    return [int(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("size", [0, 1, 40, -1])
def test_a_kill_inside_a_write_leaves_one_torn_line_that_is_never_glued_to(tmp_path: Path, size: int) -> None:
    child = subprocess.run([sys.executable, "-c", DIE_INSIDE_A_WRITE, str(tmp_path), str(size)], timeout=60)
    assert child.returncode == -signal.SIGKILL  # it died where we meant it to
    torn = read_history(tmp_path)
    assert steps(torn) == [0, 1]
    assert len(torn.torn) == (1 if size else 0)
    with HistoryWriter(tmp_path, "rank-0") as history:
        history.append(Detect(1, 0, 0, "error", "", step=3))
    mended = read_history(tmp_path)
    assert steps(mended) == [0, 1, 3]
    assert [torn.size for torn in mended.torn] == [torn.size for torn in torn.torn]  # it is still said
