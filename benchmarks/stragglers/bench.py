"""Measure how soon a slow rank is named, whether one is ever named wrongly, and what replacing it brings.

Run: python benchmarks/stragglers/bench.py [--repeats 5] [--workers 4] [--busy 0]. Every run is a `holdfast run` of
`train.py`. In the first row of the table no rank is slow; in the others one rank is, from step 500 on. The speeds are
steps per second after step 700, as a ratio to those of steps 200 to 500 of the same run. With `--busy N`, N processes
that only use processor time run beside it. With four times as many processors as workers, or more, several runs train at once.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from holdfast.events import Restart, Step, Straggler
from holdfast.history.log import read_history
from holdfast.processor_wait import COUNTER

STEPS, SINCE = 1000, 500
TRAIN = Path(__file__).with_name("train.py")
REPLACE = ("--recovery", "replay", "--spares", "1", "--replace-slow", "1.4")
CASES: dict[str, tuple[float, tuple[str, ...]]] = {
    "no rank is slow": (1.0, ()),
    "1.5 times as slow": (1.5, ()),
    "3 times as slow": (3.0, ()),
    "3 times as slow, replaced": (3.0, REPLACE),
}


class Outcome(NamedTuple):
    """The result of one run."""

    named_after: int | None  # steps since the rank became slow; None if it was not named
    wrongly: int  # reports of other ranks, or of steps in which the rank was not slow
    restarts: int
    speed: float  # after step 700, relative to before step 500
    audit: str


def main() -> int:
    """Run every case, print the table, and say whether the claims hold."""
    options = parse()
    with busy(options.busy):
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    print(about(options), end="\n\n")
    print("| | named after, steps | wrong reports | restarts | speed ratio | audit |")
    print("|---|---:|---:|---:|---:|---|")
    results: dict[str, list[Outcome]] = {}
    with ThreadPoolExecutor(at_once(options)) as pool:
        runs: dict[str, list[Future[Outcome]]] = {case: [] for case in CASES}
        for repeat in range(options.repeats):  # the cases take turns, because the speed of a machine changes
            for case, settings in CASES.items():
                runs[case].append(pool.submit(outcome, *settings, options, repeat))
        for case in CASES:
            results[case] = [run.result() for run in runs[case]]
            print(row(case, results[case]), flush=True)
    slow = [result for case, found in results.items() if CASES[case][0] > 1 for result in found]
    holds = all(r.named_after is not None and r.named_after <= 50 for r in slow)
    clean = not any(r.wrongly for found in results.values() for r in found)
    print(f"\nevery slow rank named within 50 steps: {'holds' if holds else 'FAILS'}")
    print(f"no rank named wrongly: {'holds' if clean else 'FAILS'}")
    return 0 if holds and clean else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How soon a slow rank is named.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--busy", type=int, default=0)
    return parser.parse_args()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run `processes` processes that only use processor time, inside this context."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def at_once(options: argparse.Namespace) -> int:
    """Return how many runs train at the same time: each worker has two processors, or there is one run."""
    return max(1, len(os.sched_getaffinity(0)) // (2 * options.workers))


def about(options: argparse.Namespace) -> str:
    cores = len(os.sched_getaffinity(0))
    counts = "" if COUNTER.exists() else "; its kernel does not count how long threads wait for a processor"
    others = f", {options.busy} other processes that only compute" if options.busy else ""
    return (
        f"{options.repeats} runs of {STEPS} steps for each row, {at_once(options)} at once, {options.workers} workers on "
        f"{cores} cores{others}, load {os.getloadavg()[0]:.1f} at the start{counts}; python {platform.python_version()}, torch "
        f"{version('torch')}"
    )


def outcome(factor: float, arguments: tuple[str, ...], options: argparse.Namespace, repeat: int) -> Outcome:
    """Run one case; the slow rank is another one in every repeat."""
    rank = repeat % options.workers
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            "-m",
            "holdfast",
            "run",
            "--workers",
            str(options.workers),
            "--out",
            str(out),
            *arguments,
            str(TRAIN),
        ]
        script = ["--", str(STEPS), str(rank), str(SINCE), str(factor)]
        done = subprocess.run([sys.executable, *command, *script], capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stderr[-2000:]}")
        return judged(out / "history", rank, factor, done.stdout + done.stderr)


def judged(history: Path, rank: int, factor: float, output: str) -> Outcome:
    events = read_history(history).events
    reports = [event.what for event in events if isinstance(event.what, Straggler)]
    right = [report for report in reports if factor > 1 and report.rank == rank and report.until > SINCE]
    times = {e.what.step: e.time for e in events if e.who == "rank-1" and isinstance(e.what, Step)}
    before = (SINCE - 1 - 200) / (times[SINCE - 1] - times[200])
    after = (STEPS - 1 - 700) / (times[STEPS - 1] - times[700])
    return Outcome(
        named_after=min(report.until for report in right) - SINCE if right else None,
        wrongly=len(reports) - len(right),
        restarts=sum(isinstance(event.what, Restart) for event in events),
        speed=after / before,
        audit="pass" if "audit: pass" in output else "FAIL",
    )


def row(case: str, results: list[Outcome]) -> str:
    named = sorted(result.named_after for result in results if result.named_after is not None)
    when = f"{statistics.median(named):.0f} ({named[0]} to {named[-1]})" if named else "never"
    speeds = sorted(result.speed for result in results)
    speed = f"{statistics.median(speeds):.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f})"
    audits = "pass" if all(result.audit == "pass" for result in results) else "FAIL"
    wrong, restarts = sum(r.wrongly for r in results), sum(r.restarts for r in results)
    return f"| {case} | {when} | {wrong} | {restarts} | {speed} | {audits} |"


if __name__ == "__main__":
    sys.exit(main())
