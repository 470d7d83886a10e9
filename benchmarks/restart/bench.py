"""Measure the time from the SIGKILL of a worker to the next step. Run: python benchmarks/restart/bench.py [REPEATS]

The same script, `train.py`, runs alternately under holdfast's supervisor and under `torchrun --max-restarts`. In each
launch one worker, the next rank every time, is killed by SIGKILL from outside during training. The time ends when the
last rank has done its first step after the restart, with the state of the checkpoint.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS, REPEATS, WITHIN = 4, 10, 300.0
AT_MOST, FASTER = 1.0, 6.0
SCRIPT = Path(__file__).with_name("train.py")
STAGES = ("script", "group", "model", "resumed", "first")
WHO = ("holdfast", "torchrun")
Moment = dict[str, Any]


def main() -> None:
    """Measure both launchers alternately, print the tables and say whether the claims hold."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    times: dict[str, list[dict[str, float]]] = {who: [] for who in WHO}
    for repeat in range(repeats):
        for who in WHO if repeat % 2 == 0 else reversed(WHO):
            with tempfile.TemporaryDirectory() as folder:
                times[who].append(measure(who, Path(folder), rank=repeat % WORKERS))
            print(f"{repeat + 1}/{repeats} {who}: {times[who][-1]['first']:.2f} s", file=sys.stderr)
    report(times)
    sys.exit(0 if claims(times) else 1)


def measure(who: str, folder: Path, rank: int) -> dict[str, float]:
    """Return, for each stage, the seconds from the kill until the last rank has reached it."""
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command(who, folder), stdout=log, stderr=subprocess.STDOUT)
    try:
        before = wait_for(job, folder, lambda moments: reached(moments, "step") if resumable(moments) else [])
        killed = time.time()
        os.kill(next(moment["pid"] for moment in before if moment["rank"] == rank), signal.SIGKILL)
        old = {moment["pid"] for moment in before}
        after = wait_for(job, folder, lambda moments: reached([m for m in moments if m["pid"] not in old], "first"))
        assert min(moment["step"] for moment in after) > 0, "the restarted job did not resume"
        job.wait(WITHIN)
        assert job.returncode == 0, (folder / "log").read_text()[-2000:]
    finally:
        job.kill()
        job.wait()
    fresh = [moment for moment in read(folder) if moment["pid"] not in old]
    return {stage: max(moment["time"] for moment in reached(fresh, stage)) - killed for stage in STAGES}


def command(who: str, folder: Path) -> list[str]:
    """Return the command that starts a job, with `folder` as the argument of the script."""
    if who == "torchrun":
        options = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1"]
        return [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder)]
    return [sys.executable, str(Path(__file__).resolve()), "supervise", str(folder)]


def supervise(folder: Path) -> int:
    """Run the job as `holdfast run` does."""
    from holdfast.runs.config import RunConfig
    from holdfast.supervise.supervisor import supervise

    config = RunConfig(script=str(SCRIPT), args=(str(folder),), workers=WORKERS, max_restarts=1)
    return supervise(config, folder / "run").exit_code


def read(folder: Path) -> list[Moment]:
    """Return the moments noted so far."""
    path = folder / "moments.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reached(moments: list[Moment], what: str) -> list[Moment]:
    """Return the first moment `what` of every rank, or nothing until all ranks have one."""
    first: dict[int, Moment] = {}
    for moment in moments:
        if moment["what"] == what:
            first.setdefault(moment["rank"], moment)
    return list(first.values()) if len(first) == WORKERS else []


def resumable(moments: list[Moment]) -> bool:
    """Return True if a checkpoint was written and some steps were done after it."""
    return any(moment["what"] == "step" and moment["step"] > 12 for moment in moments)


def wait_for(job: subprocess.Popen[bytes], folder: Path, found: Callable[[list[Moment]], list[Moment]]) -> list[Moment]:
    """Poll until `found` returns moments; raise if the job ends or the deadline passes first."""
    deadline = time.monotonic() + WITHIN
    while not (moments := found(read(folder))):
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job ended or stalled:\n{(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.02)
    return moments


def report(times: dict[str, list[dict[str, float]]]) -> None:
    """Print the tables of the README."""
    from torch import __version__ as torch_version  # imported late: the supervisor process imports torch in its own way

    print(f"python {platform.python_version()}, torch {torch_version}, {os.cpu_count()} cores, {WORKERS} workers")
    print("\n| kill to first step, s | median | best | worst |\n|---|---:|---:|---:|")
    for who in WHO:
        total = [stages["first"] for stages in times[who]]
        print(f"| {who} | {statistics.median(total):.2f} | {min(total):.2f} | {max(total):.2f} |")
    names = ("workers started", "process group", "model in DDP", "checkpoint loaded", "first step")
    print(f"\n| reached by all ranks after, median s | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
    for who in WHO:
        medians = (statistics.median(stages[stage] for stages in times[who]) for stage in STAGES)
        print(f"| {who} | {' | '.join(f'{median:.2f}' for median in medians)} |")


def claims(times: dict[str, list[dict[str, float]]]) -> bool:
    """Return True if a restart takes at most `AT_MOST` seconds, and torchrun takes at least `FASTER` times as long."""
    ours, theirs = ([stages["first"] for stages in times[who]] for who in WHO)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    quick, faster = statistics.median(ours) <= AT_MOST, ratio >= FASTER
    print(f"\nmedian at most {AT_MOST:g} s: {'holds' if quick else 'FAILS'} ({statistics.median(ours):.2f})")
    print(
        f"at least {FASTER:g}x faster than torchrun: {'holds' if faster else 'FAILS'} (median of the ratio within a repeat "
        f"{ratio:.1f}, from {min(ratios):.1f} to {max(ratios):.1f})"
    )
    return quick and faster


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[2])) if sys.argv[1:2] == ["supervise"] else main())
