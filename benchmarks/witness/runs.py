"""Runs of train.py under `holdfast run`, and the claims about them."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.process import PREEMPTED

TRAIN = Path(__file__).resolve().parent / "train.py"
OPTIONS = {"ddp": [], "fsdp": ["--recovery", "replay"]}


def run(
    out: Path,
    kind: str,
    workers: int,
    every: int | None,
    steps: int,
    options: Sequence[str],
    deadline: float = math.inf,
    **task: Any,
) -> str:
    """Train with `holdfast run` to the end, or until the time `deadline`; return its output."""
    arguments = [word for name, value in task.items() for word in (f"--{name}", str(value))]
    witness = ["--witness-every", str(every)] if every else []
    command = [sys.executable, "-m", "holdfast", "run", "--workers", str(workers), "--out", str(out), "--seed", "3"]
    command += [*OPTIONS[kind], *witness, *options, str(TRAIN), "--", "--kind", kind, "--steps", str(steps), *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if task["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    expected = [0]
    try:
        output, _ = process.communicate(timeout=None if deadline == math.inf else deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        process.terminate()  # the workers save and stop
        output, _ = process.communicate()
        expected.append(PREEMPTED)
    if process.returncode not in expected:
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{output}")
    return output


def claim_holds(claim: str, holds: bool) -> bool:
    """Print whether a claim holds; return `holds`."""
    print(f"{claim}: {'holds' if holds else 'FAILS'}", flush=True)
    return holds
