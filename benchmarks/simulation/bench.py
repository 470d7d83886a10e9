"""Plays many schedules of a simulated cluster, and reports what was wrong and which faults struck in which phases.

python benchmarks/simulation/bench.py --schedules 100000 --jobs 16 --seed 0
python benchmarks/simulation/bench.py --replay 98
"""

import argparse
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import torch

from simulation.faults import KINDS
from simulation.kinds import play_any

CHUNK = 50  # schedules that one process plays before it reports
SHOWN = 20
ENDS_WITHIN = 120.0  # seconds for one schedule, which takes a fraction of a second


@dataclass(slots=True)
class Report:
    """The sum of many schedules; `wrong` has the violations by seed."""

    schedules: int = 0
    simulated: float = 0.0  # seconds
    cpu: float = 0.0
    wrong: dict[int, Sequence[str]] = field(default_factory=dict)
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: "Report") -> None:
        self.schedules += other.schedules
        self.simulated += other.simulated
        self.cpu += other.cpu
        self.wrong |= other.wrong
        self.struck.update(other.struck)


@contextmanager
def ending(within: float) -> Iterator[None]:
    """Raise TimeoutError if the block does not end `within` that many seconds of the real clock."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"the schedule did not end within {within:g} s of the real clock")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, within)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def play_some(seeds: range, end: float) -> Report:
    """Play the schedules of `seeds`; start no more of them after the time `end`."""
    torch.set_num_threads(1)
    report, began = Report(), time.process_time()
    for seed in seeds:
        if time.monotonic() > end:
            break
        report.schedules += 1
        try:
            with ending(ENDS_WITHIN):
                outcome = play_any(seed)
        except TimeoutError as error:
            report.wrong[seed] = [str(error)]
            break  # a thread of this schedule may still run
        report.simulated += outcome.seconds
        report.struck.update(outcome.struck)
        if outcome.violations:
            report.wrong[seed] = outcome.violations
    report.cpu = time.process_time() - began
    return report


def play_all(first: int, schedules: int, jobs: int, limit: float) -> Report:
    """Play the schedules of `schedules` seeds in `jobs` processes; start no more of them after `limit` seconds.

    A process starts without the threads of this one, and if one is killed, this raises an error."""
    chunks = [range(i, min(i + CHUNK, first + schedules)) for i in range(first, first + schedules, CHUNK)]
    total, end = Report(), time.monotonic() + limit
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for result in [pool.submit(play_some, chunk, end) for chunk in chunks]:
            total.add(result.result())
            show_progress(total, schedules)
    return total


def show_progress(report: Report, schedules: int) -> None:
    """Print how many schedules have been played, on one line of a terminal or every 5,000 in a file."""
    line = f"{report.schedules:,} of {schedules:,} schedules, {len(report.wrong)} with a violation"
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
    elif report.schedules % (100 * CHUNK) == 0:
        print(line, *sorted(report.wrong), file=sys.stderr, flush=True)


def show(report: Report, seconds: float, jobs: int) -> None:
    per_hour = 3600 * report.schedules / seconds
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {jobs} processes, {os.cpu_count()} cores")
    print(f"{report.schedules} schedules in {seconds:.0f} s: {per_hour:,.0f} per hour")
    print(
        f"{1000 * report.cpu / report.schedules:.0f} ms of CPU time each, {report.simulated / 3600:,.0f} simulated hours"
    )
    print(f"{1000 * seconds * jobs / report.schedules:.0f} ms of wall-clock time each, in each process")
    print(f"{sum(report.struck.values())} faults, {len(report.wrong)} schedules with a violation")
    print(f"seeds with a violation: {', '.join(map(str, sorted(report.wrong))) or 'none'}\n")
    for seed, violations in sorted(report.wrong.items())[:SHOWN]:
        print(f"seed {seed}: {'; '.join(violations):.400}")
    kinds = [*KINDS, *sorted({kind for kind, _ in report.struck} - {*KINDS})]
    print(f"| phase | {' | '.join(kinds)} |\n|---|{'---:|' * len(kinds)}")
    totals = [sum(number for (struck, _), number in report.struck.items() if struck == kind) for kind in kinds]
    print(f"| all | {' | '.join(map(str, totals))} |")
    for phase in sorted({phase for _, phase in report.struck}):
        print(f"| {phase} | {' | '.join(str(report.struck[kind, phase]) for kind in kinds)} |")


def replay(seed: int) -> None:
    outcome = play_any(seed)
    print("\n".join(outcome.trace))
    print(f"digest {outcome.digest}")
    print("\n".join(outcome.violations) or "nothing is wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first schedule; the others follow")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no more are started")
    parser.add_argument("--replay", type=int, metavar="SEED", help="play one schedule and print its operations")
    options = parser.parse_args()
    if options.replay is not None:
        replay(options.replay)
        return 0
    began = time.monotonic()
    report = play_all(options.seed, options.schedules, options.jobs, options.limit)
    show(report, time.monotonic() - began, options.jobs)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
