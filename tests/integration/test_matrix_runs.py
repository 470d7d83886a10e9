"""A real matrix: interrupted, it goes on with the same command; its runs are real, killed and audited."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

WITHIN = 300.0
VARIANTS = ("reference", "blocking", "overlapped", "replay", "forward", "skip")
HOLDFAST = ("-m", "holdfast")
# The command with a Ctrl-C when the workers of its first run have finished, and their supervisor is about to return.
INTERRUPTED_AS_A_RUN_ENDS = """
import os, signal
from holdfast.cli import main
from holdfast.supervise.checkpoint_place import Checkpoints
finish_sending = Checkpoints.finish_sending

def interrupt(self):
    Checkpoints.finish_sending = finish_sending
    os.kill(os.getpid(), signal.SIGINT)
    finish_sending(self)

Checkpoints.finish_sending = interrupt
main()
"""


def start(folder: Path, program: Sequence[str] = HOLDFAST) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *program, "lab", "run", "recovery-matrix", "--quick", "--out", str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def until(path: Path, matrix: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + WITHIN
    while not path.exists():
        assert matrix.poll() is None, matrix.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_quick_matrix_resumes_after_an_interruption_without_repeating_runs(tmp_path: Path) -> None:
    runs = tmp_path / "out" / "runs" / "digits-mlp-base"
    matrix = start(tmp_path)
    until(runs / "blocking-1337" / "run.json", matrix)
    matrix.send_signal(signal.SIGINT)
    said, _ = matrix.communicate(timeout=WITHIN)
    assert matrix.returncode == 130, said
    assert "interrupted; finished runs stay in" in said
    assert said.count("\n") == 1
    assert not (runs / "blocking-1337.json").exists()
    done = (runs / "reference-1337.json").stat().st_mtime_ns

    matrix = start(tmp_path)
    said, _ = matrix.communicate(timeout=WITHIN)
    assert matrix.returncode in (0, 1), said  # which writer is faster is the machine's to say
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


def test_an_interrupt_that_arrives_as_a_run_ends_stops_the_matrix(tmp_path: Path) -> None:
    matrix = start(tmp_path, ("-c", INTERRUPTED_AS_A_RUN_ENDS))
    said, _ = matrix.communicate(timeout=WITHIN)
    assert matrix.returncode == 130, said
    assert "interrupted; finished runs stay in" in said
    assert not list(tmp_path.glob("out/runs/*/blocking-*"))
