"""Measure an iteration with 1 to 4 nodes on one machine, against a model of the added messages and copies.

usage: python benchmarks/server/scaling.py [--repeats 15] [--megabytes 16] [--work 6]

All nodes share the same cores, so more nodes add no speed here, only messages, and copies to divide pushes and to join
pulls. All settings take turns within every repeat. The model is in README.md. Exits with 1 if a claim does not hold.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
from driven import WIDE, Driven, Iteration, embedded, settings, wide

NODES = (1, 2, 3, 4)
WORKERS = 2
CALLS = 64  # messages in flight at once, to measure the cost of one
SLACK = 1.15  # allowed factor over the explained time


@dataclass
class Rates:
    """The parameters of the model, measured between the iterations."""

    call: list[float] = field(default_factory=list)  # seconds of a message, with many in flight at once
    copy: list[float] = field(default_factory=list)  # bytes a second, rows picked out of an array
    pull: list[float] = field(default_factory=list)  # bytes a second, one worker and one node
    push: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Return the median of the rate `name`."""
        return statistics.median(getattr(self, name))


@dataclass
class Case:
    """A workload with 1 to 4 nodes."""

    name: str
    state: int  # bytes that every worker pulls and pushes in a round
    rounds: int
    measured: int  # bytes that every worker pulls to measure the loss
    servers: dict[int, Driven]
    iterations: dict[int, list[Iteration]] = field(default_factory=lambda: {nodes: [] for nodes in NODES})

    def median(self, nodes: int, part: str = "seconds") -> float:
        """Return the median of one part of the iterations."""
        return statistics.median(getattr(iteration, part) for iteration in self.iterations[nodes])

    def messages(self, nodes: int) -> int:
        """Return the messages in an iteration: compute, pull, push, commit; then measure and pull once more."""
        return self.rounds * (WORKERS + 2 * WORKERS * nodes + nodes) + WORKERS + WORKERS * nodes

    def copies(self, nodes: int) -> int:
        """Return the bytes of the additional copies with more than one node.

        A node picks the requested rows; a worker allocates memory for its pull and fills it, and picks the rows for each
        node from its push.
        """
        everywhere = WORKERS * (self.rounds * self.state + self.measured)
        return (3 * everywhere if nodes > 1 else 0) + (WORKERS * self.rounds * self.state if nodes > 1 else 0)

    def expected(self, nodes: int, rates: Rates) -> float:
        """Return the seconds of an iteration by the model."""
        pulled = WORKERS * (self.rounds * self.state + self.measured)
        pushed = WORKERS * self.rounds * self.state
        return (
            self.median(1, "compute")
            + pulled / rates.median("pull")
            + pushed / rates.median("push")
            + self.median(1, "apply")
            + self.messages(nodes) * rates.median("call")
            + self.copies(nodes) / rates.median("copy")
        )

    def explained(self, nodes: int, rates: Rates) -> float:
        """Return the seconds that `nodes` nodes may add to an iteration with one."""
        more = (self.messages(nodes) - self.messages(1)) * rates.median("call")
        return more + self.copies(nodes) / rates.median("copy")


def main() -> int:
    """Measure, print the table and whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=16, help="size of the larger model")
    parser.add_argument("--work", type=int, default=6, help="matrix products of the larger model in an iteration")
    arguments = parser.parse_args()
    began = os.getloadavg()[0]
    rates = Rates()
    with tempfile.TemporaryDirectory(prefix="scaling-") as name, embedded():
        folder = Path(name)
        data = wide(folder, arguments.megabytes, arguments.work)
        cases = [case(folder, "mlr-digits", None), case(folder, WIDE, data)]
        plain = Driven(settings(folder, WIDE, 1, 1, wide(folder, arguments.megabytes)))
        for repeat in range(arguments.repeats + 1):
            print(f"repeat {repeat}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
            turn(cases, plain, rates, arguments.megabytes * 1_000_000, counts=repeat > 0)
    print(
        f"holdfast {version('holdfast')}, ray {version('ray')}, python {platform.python_version()}, numpy "
        f"{np.__version__}, {platform.system()} {platform.release()}, {os.cpu_count()} cores, load {began:.1f} at the "
        f"beginning and {os.getloadavg()[0]:.1f} at the end; {WORKERS} workers; {arguments.repeats} repeats after one "
        "that warmed up; median (min to max).\n"
    )
    return report(cases, rates)


def case(folder: Path, workload: str, data: Path | None) -> Case:
    """Start a workload with 1 to 4 nodes."""
    configured = {nodes: settings(folder, workload, nodes, WORKERS, data) for nodes in NODES}
    model = configured[1].load()
    state = sum(array.nbytes for array in model.start().values())
    measured = state * len(model.pulls(model.part(0, WORKERS), model.rounds)) // len(model.blocks)
    name = workload if data is None else f"wide, {state / 1e6:.0f} MB"
    return Case(name, state, model.rounds, measured, {nodes: Driven(chosen) for nodes, chosen in configured.items()})


def turn(cases: list[Case], plain: Driven, rates: Rates, size: int, counts: bool) -> None:
    """Run every setting once, and measure the rates."""
    for one in cases:
        for nodes, server in one.servers.items():
            iteration = server.iteration()
            if counts:
                one.iterations[nodes].append(iteration)
    alone = plain.iteration()
    call = cases[0].servers[4].message(CALLS)
    copy = copied(size)
    if counts:
        rates.call.append(call)
        rates.copy.append(copy)
        rates.pull.append(size / alone.pull)
        rates.push.append(size / alone.push)


def copied(size: int) -> float:
    """Return the bytes per second of picking half of the rows of an array."""
    array = np.ones((size // 16384, 4096), np.float32)
    rows = np.arange(0, len(array), 2)
    began = time.perf_counter()
    taken = array.take(rows, axis=0)
    return float(taken.nbytes / (time.perf_counter() - began))


def report(cases: list[Case], rates: Rates) -> int:
    """Print the table and the claims; return the exit code."""
    print(
        f"Measured between the iterations: a message {spread(rates.call, 1e3, 2)} ms, pull {spread(rates.pull, 1e-6, 0)} MB/s, push "
        f"{spread(rates.push, 1e-6, 0)} MB/s, rows picked {spread(rates.copy, 1e-6, 0)} MB/s.\n"
    )
    print(
        "| | nodes | messages | ms an iteration | compute | pull | push | apply | model | more than with 1 | explained |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for one in cases:
        for nodes in NODES:
            parts = [f"{one.median(nodes, part) * 1e3:.1f}" for part in ("compute", "pull", "push", "apply")]
            more, explained = one.median(nodes) - one.median(1), one.explained(nodes, rates)
            print(
                f"| {one.name} | {nodes} | {one.messages(nodes)} "
                f"| {spread([iteration.seconds for iteration in one.iterations[nodes]], 1e3, 1)} | {' | '.join(parts)} "
                f"| {one.expected(nodes, rates) * 1e3:.1f} | {more * 1e3:.1f} "
                f"| {explained * 1e3:.1f} |"
            )
    print()
    verdicts = []
    for one in cases:
        for nodes in NODES[1:]:
            took, allowed = one.median(nodes), SLACK * (one.median(1) + one.explained(nodes, rates))
            verdicts.append(took <= allowed)
            print(
                f"- {one.name}, {nodes} nodes: {took * 1e3:.1f} ms, {allowed * 1e3:.1f} ms allowed (with 1 node and what "
                f"messages and copies explain, times {SLACK}): {'holds' if verdicts[-1] else 'DOES NOT HOLD'}"
            )
    return 0 if all(verdicts) else 1


def spread(values: list[float], factor: float, digits: int) -> str:
    """Format the median (min to max)."""
    low, middle, high = (figure(values) * factor for figure in (min, statistics.median, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
