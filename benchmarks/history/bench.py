"""Measure the size of a history and the speed of its audit, as lines and folded into segments.

    python benchmarks/history/bench.py run [--steps 40000]                          2 workers, three kills
    python benchmarks/history/bench.py synthetic [--ranks 1024] [--steps 100000]    written by synthetic.py
    python benchmarks/history/bench.py folding [--seconds 60]                       what folding costs a worker

An audit runs in a process of its own. Its speed is in rank-steps per second of processor time, without the imports.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import synthetic

from holdfast.events import Attempt, Commit, Seconds, Step
from holdfast.history.fold import fold
from holdfast.history.folded import folded
from holdfast.history.log import HistoryWriter
from holdfast.sampler.digest import Samples

PAUSE = 2.0  # seconds between two folds
HERE = Path(__file__).parent
AUDIT = """
import json, resource, sys, time
from holdfast.audit.verdicts import audit_run, worst
begun = time.process_time()
findings = audit_run(sys.argv[1])
seconds = time.process_time() - begun
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([seconds, memory, worst(findings), [list(map(str, (f.check, f.verdict, f.because))) for f in findings]]))
"""
COST = """
import json, resource, sys, time
from holdfast.cost.breakdown import cost_of
from holdfast.cost.run_events import read_events
begun = time.process_time()
cost_of(read_events(sys.argv[1]))
seconds = time.process_time() - begun
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def size(history: Path) -> int:
    """Return the bytes that the files of a history take, without holes."""
    status = [path.stat() for path in history.rglob("*") if path.is_file()]
    return sum(min(one.st_size, one.st_blocks * 512) for one in status)


def audit(name: str, history: Path, steps: int) -> list[list[str]]:
    """Audit a history three times, print a row of the table, and return the findings."""
    results = [_measured(AUDIT, history) for _ in range(3)]
    cost = [_measured(COST, history) for _ in range(3)]
    rates = sorted(steps / seconds / 1e6 for seconds, *_ in results)
    memory, verdict = max(result[1] for result in results), results[0][2]
    row = f"{size(history) / steps:.1f} | {rates[1]:.3f} ({rates[0]:.3f} to {rates[-1]:.3f}) | {memory:.0f} | {verdict}"
    row += f" | {min(cost)[0]:.2f} to {max(cost)[0]:.2f} | {max(memory for _, memory in cost):.0f}"
    sys.stdout.write(f"| {name} | {steps:,} | {row} |\n")
    findings: list[list[str]] = results[0][3]
    return findings


def _measured(script: str, history: Path) -> list[Any]:
    command = [sys.executable, "-c", script, history]
    measured: list[Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return measured


def unfolded(history: Path, into: Path) -> Path:
    """Write the files of `history` into the folder `into` as they were before their lines were folded."""
    into.mkdir()
    for file in history.glob("*.jsonl"):
        with (into / file.name).open("wb") as whole:
            whole.writelines(folded(file).read(0, file.stat().st_size))
    return into


def run(steps: int) -> int:
    """Train with three kills, and compare the history as it is with the same history as lines."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        kills = "+".join(str(steps * percent // 100 + 3) for percent in (20, 54, 83))
        command = [sys.executable, "-m", "holdfast", "run", HERE / "train.py", "--workers", "2", "--out", out]
        options = ["--save-every", str(steps // 80), "--inject", f"kill@{kills},rank=1", "--", str(steps)]
        subprocess.run([*command, *options], check=True, capture_output=True)
        plain = unfolded(out / "history", Path(folder) / "lines")
        trained = sum(file.read_bytes().count(b'\n{"event": "step"') for file in plain.iterdir())
        findings = audit("lines", plain, trained)
        return int(audit("folded", out / "history", trained) != findings)


def large(ranks: int, steps: int) -> int:
    """Write and audit the history of a large job."""
    with TemporaryDirectory() as folder:
        history = Path(folder) / "history"
        synthetic.write(history, ranks, steps)
        findings = audit(f"{ranks:,} ranks", history, ranks * steps)
    return int(any(finding[1] != "pass" for finding in findings))


def work(history: Path, until: float, results: Connection) -> None:
    """Compute and write steps as a worker does, with a commit every 500 steps, until the time `until`.

    Send (begin, seconds of the computation, seconds of the write) of each step."""
    data, steps = bytes(1 << 20), list[tuple[float, float, float]]()
    with HistoryWriter(history, "rank-0") as log:
        log.append(Attempt(1, 1, 0, 7))
        while (begin := time.monotonic()) < until:
            zlib.crc32(data)
            computed, step = time.monotonic(), len(steps)
            samples = Samples(32, f"{step:032x}")
            log.append(
                Step(1, 1, 0, 0, step, step, samples, Seconds(0.0, computed - begin, 0.0), f"{step:032x}", 1, 0, 1)
            )
            if step % 500 == 499:
                log.append(Commit(1, step + 1, 4096))
            log.flush()
            steps.append((begin, computed - begin, time.monotonic() - computed))
    results.send(steps)


def folding(seconds: float) -> int:
    """Compare the steps of a worker while its history is folded, as the supervisor folds it, with its other steps."""
    from holdfast.supervise.child_call import ChildCall  # its memory would count as that of the audit's processes

    spans: list[tuple[float, float]] = []
    with TemporaryDirectory() as folder:
        history = Path(folder)
        receiving, sending = Pipe(duplex=False)
        worker = Process(target=work, args=(history, time.monotonic() + seconds, sending))
        worker.start()
        while not receiving.poll(PAUSE):
            begin = time.monotonic()
            call = ChildCall(lambda: os.nice(19) and fold(history), "folding")
            while not call.is_done():
                time.sleep(0.002)
            spans.append((begin, time.monotonic()))
        steps = np.array(receiving.recv())
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the worker has not ended yet
        count = folded(history / "rank-0.jsonl").lines
        worker.join()
    ends = steps.sum(axis=1)
    within = np.any([(ends > begin) & (steps[:, 0] < end) for begin, end in spans], axis=0)
    cost = (used.ru_utime + used.ru_stime) / count * 1e6
    sys.stdout.write(f"{len(steps):,} steps; {count:,} were folded, for {cost:.0f} us of another process each\n\n")
    sys.stdout.write("| part of a step | while folding | otherwise | ratio |\n|---|---:|---:|---:|\n")
    for name, column in (("computation", 1), ("write", 2)):
        for at in (50, 90, 99):
            during, beside = (np.percentile(steps[rows, column], at) * 1e6 for rows in (within, ~within))
            row = f"{name}, {at}th percentile | {during:.0f} us | {beside:.0f} us | {during / beside:.2f}"
            sys.stdout.write(f"| {row} |\n")
    share = sum(end - begin for begin, end in spans) / seconds
    sys.stdout.write(f"\n{within.sum():,} steps were while folding, which took {share:.0%} of the time\n")
    return 0


def main() -> int:
    """Print the rows of the table; return 1 if an audit has other findings than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "synthetic", "folding"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    if given.what == "folding":
        return folding(given.seconds)
    sys.stdout.write("| history | rank-steps | bytes each | audit, millions a second | MB | verdict | cost, s | MB |\n")
    return run(given.steps or 40_000) if given.what == "run" else large(given.ranks, given.steps or 100_000)


if __name__ == "__main__":
    sys.exit(main())
