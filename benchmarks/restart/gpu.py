"""From the SIGKILL of a worker on a GPU to its first step, by part: holdfast and torchrun in turns.

Run: python benchmarks/restart/gpu.py [--repeats 3]. Needs a GPU. Each launch of gpu_train.py is killed twice; the first
kill warms up what a long job has warm (the page cache and compiled kernels), the second is measured.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SCRIPT = Path(__file__).with_name("gpu_train.py")
KILLS, STEPS_BEFORE, LIMIT = 2, 60, 180.0
PARTS = ("process", "attach", "model on the CPU", "to the GPU", "replicate", "restore", "first batch", "first step")


def command(arm: str, notes: Path, out: Path) -> list[str]:
    """Return the command that trains with one worker under `arm`."""
    if arm == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "9"]
        return [*launch, str(SCRIPT), arm, str(notes)]
    launch = [
        sys.executable,
        "-c",
        "from holdfast.cli import main; main()",
        "run",
        "--workers",
        "1",
        "--save-every",
        "20",
    ]
    return [*launch, "--out", str(out), str(SCRIPT), "--", "holdfast", str(notes)]


def wait_for(condition: object, process: subprocess.Popen[bytes]) -> None:
    """Poll until `condition()` is true."""
    deadline = time.monotonic() + LIMIT
    while not condition():  # type: ignore[operator]
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run ended with {process.poll()} or took longer than {LIMIT:g} s")
        time.sleep(0.005)


def measure(arm: str, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of each part of the last restart of one launch."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        notes = Path(place) / "notes"
        notes.mkdir()
        with (Path(place) / "log").open("wb") as log:
            process = subprocess.Popen(
                command(arm, notes, Path(place) / "run"), env=environment, stdout=log, stderr=log
            )
        try:
            for number in range(KILLS):
                wait_for(lambda count=number: len(list(notes.glob("start-*"))) > count, process)
                begin = int((notes / "step").read_text())
                wait_for(lambda begin=begin: int((notes / "step").read_text() or 0) >= begin + STEPS_BEFORE, process)
                pid = json.loads(max(notes.glob("start-*")).read_text())["pid"]
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: len(list(notes.glob("start-*"))) > KILLS, process)
            start = json.loads(max(notes.glob("start-*")).read_text())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    times = [killed, start["began"], *(start["parts"][part] for part in PARTS[1:])]
    return {part: after - before for part, before, after in zip(PARTS, times, times[1:], strict=False)}


def main() -> None:
    """Measure the arms in turns and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", help="the src folder of another version, which is measured in the same run")
    given = parser.parse_args()
    arms = {"holdfast": dict(os.environ)}
    if given.before:
        arms["holdfast before"] = {**os.environ, "PYTHONPATH": given.before}
    arms["torchrun"] = dict(os.environ)
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(given.repeats):
        for arm, environment in arms.items():
            results[arm].append(measure(arm, environment))
            print(
                arm,
                {part: round(seconds, 2) for part, seconds in results[arm][-1].items()},
                file=sys.stderr,
                flush=True,
            )
    print(
        f"| seconds, median of {given.repeats} | {' | '.join(PARTS)} | kill to first step |\n|---|{'---:|' * (len(PARTS) + 1)}"
    )
    for arm, rows in results.items():
        totals = sorted(sum(row.values()) for row in rows)
        cells = [f"{median(row[part] for row in rows):.2f}" for part in PARTS]
        print(f"| {arm} | {' | '.join(cells)} | {median(totals):.2f} ({totals[0]:.2f} to {totals[-1]:.2f}) |")


if __name__ == "__main__":
    main()
