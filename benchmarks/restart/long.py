"""Measure whether a restart takes longer after a long history. Run: python benchmarks/restart/long.py [REPEATS]

Two folders hold the same run of 4 workers, stopped in order after some steps. Invented steps are written into their
histories before the trained ones: 1,000 in one, 1,000,000 in the other. The two runs are continued alternately, and a
worker is killed each time. The benchmark compares the time from the kill to the first new step of the last rank, and
the time from the start of the command to the first step.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKERS, REPEATS, WITHIN = 4, 10, 300.0
SHORT, LONG = 1_000, 1_000_000
AT_MOST = 1.10
TRAIN = """
import torch
import holdfast as hf
run = hf.attach()
model = run.replicate(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.protect(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
for x, y in run.batches(data, global_batch=64, num_epochs=100_000):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Times = dict[int, list[tuple[float, float]]]


def main() -> int:
    """Prepare both folders, restart them alternately, print the table and say whether the claim holds."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    times: Times = {SHORT: [], LONG: []}
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        script.write_text(TRAIN)
        for steps in times:
            prepare(Run(Path(place) / str(steps), script), steps)
        for repeat in range(repeats):
            for steps in list(times) if repeat % 2 == 0 else reversed(list(times)):
                times[steps].append(restarted(Run(Path(place) / str(steps), script)))
            print(f"{repeat + 1}/{repeats}: {times[SHORT][-1]}, {times[LONG][-1]}", file=sys.stderr, flush=True)
    return report(times)


class Run:
    """A run in a folder, seen from outside; only events written after construction are read."""

    def __init__(self, out: Path, script: Path) -> None:
        self.out, self._script = out, script
        self._sizes = {file: file.stat().st_size for file in self._files()}
        self._job: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        """Start or continue the run."""
        command = [sys.executable, "-c", "from holdfast.cli import main; main()", "run", "--workers", str(WORKERS)]
        command += ["--save-every", "10", "--out", str(self.out), *options, str(self._script)]
        self._job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """Send SIGTERM, so that the run saves and stops."""
        assert self._job is not None
        self._job.send_signal(signal.SIGTERM)
        assert self._job.wait(WITHIN) == 75, "the run did not stop in order"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of `kind` written since construction."""
        return [event for file in self._files() for event in self._lines(file) if event["event"] == kind]

    def wait_for(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Poll until there are `count` events of `kind`."""
        deadline = time.monotonic() + WITHIN
        while len(found := self.events(kind)) < count:
            assert time.monotonic() < deadline, f"waited {WITHIN:g} s for {count} {kind}s"
            time.sleep(0.05)
        return found

    def _files(self) -> list[Path]:
        return sorted((self.out / "history").glob("*.jsonl"))

    def _lines(self, file: Path) -> Iterator[dict[str, Any]]:
        with file.open("rb") as lines:
            lines.seek(self._sizes.get(file, 0))
            yield from (json.loads(line) for line in lines if line.endswith(b"\n"))


def prepare(run: Run, steps: int) -> None:
    """Make a run that was stopped in order, and add `steps` steps to its history."""
    run.start()
    run.wait_for("step", 100)
    run.stop()
    for file in (run.out / "history").glob("rank-*.jsonl"):
        lines = file.read_bytes().splitlines(keepends=True)
        first = next(i for i, line in enumerate(lines) if b'"event": "step"' in line)
        event = json.loads(lines[first])
        with file.open("wb") as longer:
            longer.writelines(lines[:first])
            longer.writelines(json.dumps(event | {"step": number}).encode() + b"\n" for number in range(steps))
            longer.writelines(lines[first:])


def restarted(run: Run) -> tuple[float, float]:
    """Continue the run, kill a worker and stop; return the seconds from start to first step, and from kill to next step."""
    stopped = max(int(folder.name.removeprefix("step-")) for folder in (run.out / "checkpoints").glob("step-*"))
    began = time.time()
    run.start("--inject", f"kill@{stopped + 40},rank=1")
    (strike,) = run.wait_for("failure", 1)
    (restart,) = run.wait_for("restart", 1)
    run.wait_for("attempt", 2 * WORKERS)
    while len(first := firsts(run, restart["attempt"])) < WORKERS:
        time.sleep(0.05)
    before = firsts(run, restart["attempt"] - 1)
    run.stop()
    return max(before.values()) - began, max(first.values()) - strike["time"]


def firsts(run: Run, attempt: int) -> dict[str, float]:
    """Return the time at which each rank had done its first step of `attempt`."""
    found: dict[str, float] = {}
    for step in run.events("step"):
        if step["attempt"] == attempt:
            found.setdefault(step["who"], step["time"])
    return found


def report(times: Times) -> int:
    """Print the table and whether the claim holds; return the exit code."""
    from torch import __version__ as torch_version

    print(f"python {platform.python_version()}, torch {torch_version}, {os.cpu_count()} cores, {WORKERS} workers")
    print("\n| recorded steps | kill to first step, s | start to first step, s | n |\n|---:|---|---|---:|")
    for steps, seconds in times.items():
        starts, restarts = zip(*seconds, strict=True)
        print(f"| {steps:,} | {spread(restarts)} | {spread(starts)} | {len(seconds)} |")
    ratios = [long[1] / short[1] for short, long in zip(times[SHORT], times[LONG], strict=True)]
    holds = statistics.median(ratios) <= AT_MOST
    print(
        f"\nat most {AT_MOST:g}x after {LONG:,} steps: {'holds' if holds else 'FAILS'} (ratio within a repeat: {spread(ratios)})"
    )
    return 0 if holds else 1


def spread(values: Any) -> str:
    """Format the median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
