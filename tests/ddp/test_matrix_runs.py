"""A real matrix: interrupted, it goes on with the same command; its runs are real, killed and audited."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TINY = """\
steps = 12
batch = 16
workers = 2
save_every = 4
seeds = [7]
datasets = ["digits"]
models = ["mlp-small"]
variants = ["reference", "overlapped"]

[failures.base]
steps = [6]
kind = "kill"
ranks = [1]
"""
WITHIN = 120.0


def start(folder: Path) -> "subprocess.Popen[str]":
    (folder / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "holdfast", "lab", "run", "recovery-matrix"]
    options = ["--config", str(folder / "tiny.toml"), "--out", str(folder / "out")]
    return subprocess.Popen(
        [*command, *options],
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


def test_an_interrupted_matrix_goes_on_with_the_same_command_and_does_nothing_twice(tmp_path: Path) -> None:
    runs = tmp_path / "out" / "runs" / "digits-mlp-small-base"
    matrix = start(tmp_path)
    until(runs / "overlapped-7" / "run.json", matrix)
    matrix.send_signal(signal.SIGINT)
    said, _ = matrix.communicate(timeout=WITHIN)
    assert matrix.returncode == 130, said
    assert "interrupted; runs that are done stay in" in said
    assert said.count("\n") == 1
    assert not (runs / "overlapped-7.json").exists()
    done = (runs / "reference-7.json").stat().st_mtime_ns

    matrix = start(tmp_path)
    said, _ = matrix.communicate(timeout=WITHIN)
    assert matrix.returncode == 0, said
    assert (runs / "reference-7.json").stat().st_mtime_ns == done
    found = {name: json.loads((runs / f"{name}-7.json").read_text()) for name in ("reference", "overlapped")}
    assert [found[name]["audit"] for name in found] == ["pass", "pass"]
    assert [found[name]["restarts"] for name in found] == [0, 1]
    assert found["overlapped"]["struck"] == [[6, "kill", "boundary", 1]]
    assert found["overlapped"]["losses"] == found["reference"]["losses"]  # bit by bit
    steps, apart, lengths = zip(*found["overlapped"]["distances"], strict=True)
    assert steps == (0, 4, 8, 12)
    assert apart == (0.0,) * 4
    assert min(lengths) > 0
    assert not any(runs.glob("*/checkpoints/step-*"))  # once compared
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {claim["id"]: claim["measured"] for claim in result["claims"]} == {"pass-rate": 1, "gates": 1, "exact": 0}
    assert "Means of 1 suite" in [table["title"] for table in result["tables"]]
