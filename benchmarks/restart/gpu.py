"""From the SIGKILL of a worker on a GPU to its first step, by part: holdfast, with and without a spare, and torchrun.

Run: python benchmarks/restart/gpu.py [--repeats 3] [--small] [--no-torchrun]. Needs a GPU; with --small it trains a smaller model, on
the CPU if there is no GPU. The arms take turns. Each launch of gpu_train.py is killed twice; the first kill warms up
what a long job has warm (the page cache and compiled kernels), the second is measured.
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
KILLS, STEPS_BEFORE, LIMIT = 2, 25, 180.0
SPARE = "holdfast with a spare"
READY = b"ready to take over"
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
        "--spares",
        "1" if arm == SPARE else "0",
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
        output = Path(place) / "log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                command(arm, notes, Path(place) / "run"), env=environment, stdout=log, stderr=log
            )
        try:
            for number in range(KILLS):
                wait_for(lambda count=number: len(list(notes.glob("start-*"))) > count, process)
                begin = int((notes / "step").read_text())
                wait_for(lambda begin=begin: int((notes / "step").read_text() or 0) >= begin + STEPS_BEFORE, process)
                if arm == SPARE:
                    wait_for(lambda count=number: output.read_bytes().count(READY) > count, process)
                pid = json.loads(max(notes.glob("start-*")).read_text())["pid"]
                killed = time.time()
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: len(list(notes.glob("start-*"))) > KILLS, process)
            start = json.loads(max(notes.glob("start-*")).read_text())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    # What a spare did before the kill took no time of the restart.
    times = [max(killed, at) for at in (killed, start["began"], *(start["parts"][part] for part in PARTS[1:]))]
    return {part: after - before for part, before, after in zip(PARTS, times, times[1:], strict=False)}


def main() -> None:
    """Measure the arms in turns and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="train a smaller model, also without a GPU")
    parser.add_argument("--no-torchrun", action="store_true", help="measure holdfast only, which takes less time")
    parser.add_argument("--before", help="the src folder of another version, which is measured in the same run")
    given = parser.parse_args()
    environment = {**os.environ, **({"SMALL": "1", "OMP_NUM_THREADS": "1"} if given.small else {})}
    arms = {"holdfast": environment, SPARE: environment}
    if given.before:
        arms["holdfast before"] = {**environment, "PYTHONPATH": given.before}
    if not given.no_torchrun:
        arms["torchrun"] = environment
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
    pairs = zip(results[SPARE], results["holdfast"], strict=True)
    ratios = sorted(sum(spare.values()) / sum(without.values()) for spare, without in pairs)
    print(f"\nwith a spare, ratio within a repeat: {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
