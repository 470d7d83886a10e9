"""Measure the time from a kill to the next finished iteration, for processes of a served run and whole raylets.

usage: python benchmarks/server/recovery.py [--runs 5] [--raylets 5] [--seed 12]

Every run loses its controller, two nodes and a worker, some iterations apart. Every run on raylets loses one of three
raylets, killed or suspended with all processes on it. The clock runs from the signal to the end of the first iteration
after the controller has recorded the loss, so an iteration that was nearly done does not count. Exits with 1 if a claim
does not hold.
"""

import argparse
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from command import Command, Plan
from raylets import Raylets, raylets, send

PLAN = Plan(workload="mlr-digits", nodes=4, workers=3)
VICTIMS = ("node", "controller", "worker", "node")
ALLOWED = {"node": 1.0, "worker": 1.0, "controller": 1.0, "raylet killed": 3.0, "raylet stopped": 3.0}
RAYLET = {"raylet killed": signal.SIGKILL, "raylet stopped": signal.SIGSTOP}
FIRST, APART = 8, 12  # iterations
SECONDS = 300.0  # allowed for a run
TRIES = 5  # attempts to find a raylet to strike


class Times:
    """The measured seconds by kind of strike."""

    def __init__(self) -> None:
        self.lost: dict[str, list[float]] = defaultdict(list)  # from the signal until the loss is recorded
        self.back: dict[str, list[float]] = defaultdict(list)  # from the signal until an iteration is done
        self.usual: list[float] = []  # of iterations before the first strike

    def take(self, command: Command, kind: str, struck: float) -> None:
        """Wait until a run has recovered, and note the time."""
        names = (kind,) if kind not in RAYLET else ("node", "worker")
        found: list[tuple[float, float]] = []

        def back() -> bool:
            recent = [event for event in command.events() if event["time"] > struck]
            lost = [event["time"] for event in recent if event["event"] == "lost" and event["kind"] in names]
            done = [event["time"] for event in recent if event["event"] == "iterate"]
            found.extend((lost[0], time_) for time_ in done if lost and time_ > lost[-1])
            return bool(found)

        if not command.wait(back):
            raise SystemExit(f"a run ended before it recovered from the loss of a {kind}:\n{command.output}")
        self.lost[kind].append(found[0][0] - struck)
        self.back[kind].append(found[0][1] - struck)
        print(f"{kind}: {self.lost[kind][-1]:.2f} s, {self.back[kind][-1]:.2f} s", file=sys.stderr, flush=True)


def main() -> int:
    """Measure, print the table and whether the claims hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs in which four processes are killed")
    parser.add_argument(
        "--raylets", type=int, default=5, help="runs with one raylet killed, and as many with one suspended"
    )
    parser.add_argument("--seed", type=int, default=12)
    arguments = parser.parse_args()
    rng, times = random.Random(arguments.seed), Times()
    began = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder, raylets(3) as cluster:
        for number in range(arguments.runs):
            on_processes(cluster, Path(folder) / f"run-{number}", times, rng)
        for number in range(arguments.raylets):
            for kind in RAYLET:
                on_raylet(cluster, Path(folder) / f"{kind.replace(' ', '-')}-{number}", times, rng, kind)
    print(
        f"holdfast {version('holdfast')}, ray {version('ray')}, python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, load {began:.1f} at the beginning and "
        f"{os.getloadavg()[0]:.1f} at the end; {PLAN}; seed {arguments.seed}; an iteration without failure takes "
        f"{statistics.median(times.usual) * 1000:.0f} ms ({min(times.usual) * 1000:.0f} to {max(times.usual) * 1000:.0f}).\n"
    )
    return report(times)


def on_processes(cluster: Raylets, out: Path, times: Times, rng: random.Random) -> None:
    """Kill processes of a run, one after another."""
    command = Command(PLAN, cluster.address, out, SECONDS)
    for number, kind in enumerate(VICTIMS):
        if not command.await_iterations(FIRST + number * APART):
            raise SystemExit(f"a run ended early:\n{command.output}")
        if not number:
            times.usual += usual(command)
        time.sleep(rng.uniform(0, 0.2))
        victim = (
            cluster.training(command.history) if kind == "controller" else rng.choice(sorted(cluster.members(kind)))
        )
        struck = time.time()
        send(victim, signal.SIGKILL)
        times.take(command, kind, struck)
    finish(cluster, command)


def on_raylet(cluster: Raylets, out: Path, times: Times, rng: random.Random, kind: str) -> None:
    """Strike one raylet with every process on it; try again if Ray puts all processes where they cannot be struck."""
    for attempt in range(TRIES):
        command = Command(PLAN, cluster.address, out.with_name(f"{out.name}-{attempt}"), SECONDS)
        if not command.await_iterations(FIRST):
            raise SystemExit(f"a run ended early:\n{command.output}")
        if there := cluster.inhabited():
            break
        finish(cluster, command)
    else:
        raise SystemExit(f"no process ran on a raylet that can be struck, tried {TRIES} times")
    times.usual += usual(command)
    time.sleep(rng.uniform(0, 0.2))
    raylet = rng.choice(there)
    struck = time.time()
    cluster.strike(raylet, RAYLET[kind], everything=True)
    times.take(command, kind, struck)
    finish(cluster, command)
    cluster.renew(raylet)


def finish(cluster: Raylets, command: Command) -> None:
    """Wait for the end of a run."""
    if command.end():
        raise SystemExit(f"a run did not end well:\n{command.output}")
    cluster.left_behind()


def usual(command: Command) -> list[float]:
    """Return the seconds of the iterations so far, without the first, which compiles code."""
    return [event["seconds"] for event in command.events() if event["event"] == "iterate"][1:]


def report(times: Times) -> int:
    """Print the table and the claims; return the exit code."""
    print(
        "| struck | times | seconds until its loss is recorded | until an iteration is done, median | worst | allowed |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for kind, back in times.back.items():
        lost = times.lost[kind]
        print(
            f"| {kind} | {len(back)} | {statistics.median(lost):.2f} ({min(lost):.2f} to {max(lost):.2f}) "
            f"| {statistics.median(back):.2f} | {max(back):.2f} | {ALLOWED[kind]:g} |"
        )
    print()
    verdicts = []
    for kind, back in times.back.items():
        for what, value in (("median", statistics.median(back)), ("worst", max(back))):
            verdicts.append(value < ALLOWED[kind])
            holds = "holds" if verdicts[-1] else "DOES NOT HOLD"
            print(f"- {kind}: {what} {value:.2f} s, under {ALLOWED[kind]:g} s: {holds}")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
