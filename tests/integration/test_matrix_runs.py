"""A real matrix: interrupted, it goes on with the same command; its runs are real, killed and audited."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor_process import Command, StartCommand, wait_until

WITHIN = 300.0
VARIANTS = ("reference", "blocking", "overlapped", "replay", "forward", "skip")
# No run is repeated because other virtual machines took much of the CPU time. The network stays as it is: with a smaller
# one, the steps would be over before a lost worker is replaced, and its second failure could not strike.
ONCE = """
from holdfast.lab.matrix import runner
runner.STOLEN = 1.0
"""
# A Ctrl-C when the workers of the first run have finished, and their supervisor is about to return.
INTERRUPTED_AS_A_RUN_ENDS = """
import os, signal
from holdfast.supervise.checkpoint_place import Checkpoints
finish_sending = Checkpoints.finish_sending

def interrupt(self):
    Checkpoints.finish_sending = finish_sending
    os.kill(os.getpid(), signal.SIGINT)
    finish_sending(self)

Checkpoints.finish_sending = interrupt
"""
Start = Callable[..., Command]


@pytest.fixture
def start(start_command: StartCommand, tmp_path: Path) -> Start:
    """A function that starts the matrix in the folder of the test."""

    def run(before: str = "") -> Command:
        arguments = ("lab", "run", "recovery-matrix", "--quick", "--out", tmp_path / "out")
        return start_command(*arguments, before=ONCE + before, environment={"COLUMNS": "200"}, together=True)

    return run


def test_the_quick_matrix_resumes_after_an_interruption_without_repeating_runs(start: Start, tmp_path: Path) -> None:
    runs = tmp_path / "out" / "runs" / "digits-mlp-base"
    matrix = start()
    wait_until(lambda: matrix.over or (runs / "blocking-1337" / "run.json").exists(), "the second run", WITHIN)
    matrix.signal(signal.SIGINT)
    assert matrix.wait(WITHIN) == 130, matrix.stdout
    *progress, last = matrix.stdout.splitlines()
    assert "interrupted; finished runs stay in" in last
    assert all(line.startswith("runs: ") for line in progress)  # of a slow machine
    assert not (runs / "blocking-1337.json").exists()
    done = (runs / "reference-1337.json").stat().st_mtime_ns

    matrix = start()
    assert matrix.wait(WITHIN) in (0, 1), matrix.stdout  # which writer is faster is the machine's to say
    assert (runs / "reference-1337.json").stat().st_mtime_ns == done
    found = {name: json.loads((runs / f"{name}-1337.json").read_text()) for name in VARIANTS}
    assert [found[name]["audit"] for name in found] == ["pass"] * 6
    assert [found[name]["restarts"] for name in found] == [0, 2, 2, 0, 0, 0]
    assert [[each[0] for each in found[name]["struck"]] for name in found] == [[], *[[7, 16]] * 5]
    for name in ("blocking", "overlapped", "replay"):
        assert found[name]["losses"] == found["reference"]["losses"]  # bit by bit
    steps, apart, lengths = zip(*found["overlapped"]["distances"], strict=True)
    assert steps == (0, 3, 6, 9, 12, 15, 18, 20)
    assert apart == (0.0,) * 8
    assert min(lengths) > 0
    assert not any(runs.glob("*/checkpoints/step-*"))  # once compared
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    claims = {claim["id"]: claim["measured"] for claim in result["claims"]}
    assert (claims["pass-rate"], claims["gates"], claims["exact"]) == (1, 1, 0)
    assert "Means of 1 suite" in [table["title"] for table in result["tables"]]


def test_an_interrupt_that_arrives_as_a_run_ends_stops_the_matrix(start: Start, tmp_path: Path) -> None:
    matrix = start(INTERRUPTED_AS_A_RUN_ENDS)
    assert matrix.wait(WITHIN) == 130, matrix.stdout
    assert "interrupted; finished runs stay in" in matrix.stdout
    assert not list(tmp_path.glob("out/runs/*/blocking-*"))
