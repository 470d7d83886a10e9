"""Measure how long training waits for a checkpoint: each question to the nodes, and a message that asks nothing.

usage: python benchmarks/server/checkpoint.py [--data DIR] [--workload lda-20news] [--repeats 15]

The workload is a topic model on 4 nodes with 2 workers, as in the experiment server-overhead. After every iteration the
nodes get a message that asks nothing; then they choose a quarter of their blocks to save and copy it; nothing is written.
They are surveyed twice: the first survey makes them measure distances, the second finds the distances measured.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections import defaultdict
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

from driven import Driven, embedded, settings

from holdfast.blocks.policy import Policy

NODES, WORKERS = 4, 2
QUARTERS = Policy(ranking="priority", interval=4, fraction=Fraction(1, 4))
EXTRA = ("a message that asks nothing", "survey")  # not part of a checkpoint, which needs one survey


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with data sets")
    parser.add_argument("--workload", default="lda-20news")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    began, seconds, iterations = os.getloadavg()[0], defaultdict(list), []
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder, embedded():
        data = None if arguments.data is None else arguments.data.absolute()
        driven = Driven(settings(Path(folder), arguments.workload, NODES, WORKERS, data, QUARTERS))
        for repeat in range(arguments.repeats + 1):
            iteration, took = driven.iteration(), driven.checkpoint()
            print(f"repeat {repeat}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            if repeat:
                iterations.append(iteration.seconds)
                for what, part in took.items():
                    seconds[what].append(part)
                seconds["checkpoint"].append(sum(part for what, part in took.items() if what not in EXTRA))
        driven.end()
    print(
        f"holdfast {version('holdfast')}, ray {version('ray')}, python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, load {began:.1f} at the beginning and "
        f"{os.getloadavg()[0]:.1f} at the end; {arguments.workload}, {NODES} nodes, {WORKERS} workers; "
        f"{arguments.repeats} repeats after one that warmed up; an iteration takes {spread(iterations)} ms.\n"
    )
    print("| to all nodes and back | ms, median (min to max) | of the iteration |\n|---|---:|---:|")
    for what, values in seconds.items():
        share = statistics.median(values) / statistics.median(iterations)
        print(f"| {what} | {spread(values)} | {share:.1%} |")
    return 0


def spread(values: list[float]) -> str:
    """Format milliseconds: median (min to max)."""
    low, middle, high = (figure(values) * 1e3 for figure in (min, statistics.median, max))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    sys.exit(main())
