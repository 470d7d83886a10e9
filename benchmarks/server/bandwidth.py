"""Measure the bandwidth of pulls and pushes, against a copy in memory and Ray's own transfer of the same bytes.

usage: python benchmarks/server/bandwidth.py [--megabytes 16 64 256] [--nodes 1 2 4] [--repeats 9]

One worker pulls and pushes all blocks; all methods take turns within every repeat. Exits with 1 if a claim does not hold.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray
from driven import WIDE, Driven, embedded, settings, wide

COPY, SENT, SENT_AND_COPIED = "copy in memory", "Ray: actor to actor", "Ray: actor to actor, copied out"
ALLOWED = 0.5  # smallest share of the bandwidth of Ray's own transfer with the copy out of it
FROM = 64  # megabytes from which this is claimed; below, the calls dominate


class Source:
    """An actor that holds an array."""

    def __init__(self, numbers: int) -> None:
        self._array = np.ones(numbers, np.float32)

    def give(self) -> Any:
        return self._array


class Sink:
    """An actor that receives the array of a source."""

    def __init__(self, source: Any, numbers: int) -> None:
        self._source, self._room = source, np.zeros(numbers, np.float32)

    def take(self) -> tuple[float, float]:
        """Return the seconds until the array can be read, and until it is copied to private memory."""
        began = time.perf_counter()
        array = ray.get(self._source.give.remote())
        here = time.perf_counter()
        np.copyto(self._room, array)
        return here - began, time.perf_counter() - began


def main() -> int:
    """Measure all sizes, print the table and whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    print(
        f"holdfast {version('holdfast')}, ray {version('ray')}, python {platform.python_version()}, "
        f"numpy {np.__version__}, {platform.system()} {platform.release()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f} at the beginning; {arguments.repeats} repeats after one that warmed up.\n"
    )
    with tempfile.TemporaryDirectory(prefix="bandwidth-") as folder, embedded():
        measured = {size: sized(Path(folder), size, arguments.nodes, arguments.repeats) for size in arguments.megabytes}
    return report(measured, arguments.nodes)


def sized(folder: Path, megabytes: int, nodes: list[int], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every method for `megabytes`, one value per repeat."""
    numbers = megabytes * 1_000_000 // 4
    array, room = np.ones(numbers, np.float32), np.zeros(numbers, np.float32)
    source: Any = ray.remote(num_cpus=0)(Source)
    sink: Any = ray.remote(num_cpus=0)(Sink)
    giving = source.remote(numbers)
    taking = sink.remote(giving, numbers)
    servers = {count: Driven(settings(folder, WIDE, count, 1, wide(folder, megabytes))) for count in nodes}
    seconds: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        print(f"{megabytes} MB, repeat {repeat}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        once = {COPY: copied(array, room)}
        once[SENT], once[SENT_AND_COPIED] = ray.get(taking.take.remote(), timeout=120)
        for count, server in servers.items():
            iteration = server.iteration()
            once[pulled(count)], once[pushed(count)] = iteration.pull, iteration.push
        for what, took in once.items():
            seconds[what] += [took] * (repeat > 0)
    for server in servers.values():
        server.end()
    for actor in (giving, taking):
        ray.kill(actor)
    return seconds


def copied(array: Any, room: Any) -> float:
    """Return the seconds of a plain copy."""
    began = time.perf_counter()
    np.copyto(room, array)
    return time.perf_counter() - began


def pulled(nodes: int) -> str:
    return f"pull from {nodes} node{'s' * (nodes > 1)}"


def pushed(nodes: int) -> str:
    return f"push to {nodes} node{'s' * (nodes > 1)}"


def report(measured: dict[int, dict[str, list[float]]], nodes: list[int]) -> int:
    """Print the table in megabytes a second and the claims; return the exit code."""
    print("| MB/s, median (min to max) | " + " | ".join(f"{size} MB" for size in measured) + " |")
    print("|---|" + "---:|" * len(measured))
    for what in next(iter(measured.values())):
        print(f"| {what} | " + " | ".join(rates(size, seconds[what]) for size, seconds in measured.items()) + " |")
    print(f"\nload {os.getloadavg()[0]:.1f} at the end\n")
    verdicts = []
    for size, seconds in measured.items():
        for what in (name(count) for count in nodes for name in (pulled, pushed)) if size >= FROM else ():
            ratios = [ray_took / took for ray_took, took in zip(seconds[SENT_AND_COPIED], seconds[what], strict=True)]
            ratio = statistics.median(ratios)
            verdicts.append(ratio >= ALLOWED)
            print(
                f"- {size} MB, {what}: {ratio:.2f} of the bandwidth of Ray's transfer with a copy out of it "
                f"({min(ratios):.2f} to {max(ratios):.2f} side by side), {ALLOWED} at least: "
                f"{'holds' if verdicts[-1] else 'DOES NOT HOLD'}"
            )
    return 0 if all(verdicts) else 1


def rates(megabytes: int, seconds: list[float]) -> str:
    """Format megabytes a second."""
    values = [megabytes / taken for taken in seconds]
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
