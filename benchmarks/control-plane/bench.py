"""Measure the control of a run with many workers: its start, losses of a worker, a node and the keeper, and scaling.

Run: python benchmarks/control-plane/bench.py [--sizes 1x16,4x16,16x16,64x16] [--per-node 16]. Each size is a number of
nodes times the workers of each. Every node is a real `holdfast run` on the loopback interface, and its workers are light
(`light_worker.py`). The keeper is the node that keeps the store of the workers and decides who trains. Only runs on one
node can be scaled, so `--sizes 1x16,1x1024` measures that, too.
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from board import Board, Entry

from holdfast.supervise.scale_request import scale

HERE = Path(__file__).parent
STEADY = 5.0  # seconds of the measurement while nothing fails
LOST_AFTER = 5.0
FEW = 16  # workers that are left when a larger run is scaled down
WITHIN = 180.0  # seconds allowed for each phase
ISOLATED = "HOLDFAST_BENCH_ISOLATED"
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SPARE_SEATS = 8  # entries of the board for each worker, because a replacement has a process number of its own


class Phase(NamedTuple):
    """The cost of one phase: its seconds, the traffic on the loopback interface, and the processor time."""

    seconds: float
    megabytes: float
    packets: int
    keeper: float | None  # processor seconds of the keeper's supervisor; None if it was lost
    busiest: float  # of the busiest other process of the run


def main() -> int:
    options = parse()
    isolate()
    print(about(), end="\n\n")
    results: dict[int, dict[str, Phase]] = {}
    for nodes, workers in options.sizes:
        with Run(nodes, workers) as run:
            results[nodes * workers] = measured(run)
        print(table(nodes, workers, results[nodes * workers]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"about": about(), "results": results}))
    for line in slopes(results):
        print(line)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of controlling a run, by its number of workers.")
    parser.add_argument("--sizes", type=sizes, default=sizes("1x16,4x16,16x16,64x16"))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def sizes(text: str) -> list[tuple[int, int]]:
    return [(int(nodes), int(workers)) for nodes, _, workers in (size.partition("x") for size in text.split(","))]


def isolate() -> None:
    """Continue in a network namespace of its own, if that is allowed, so that only the traffic of the run is counted."""
    unshare = shutil.which("unshare")
    if ISOLATED not in os.environ and unshare and subprocess.run([unshare, "-rn", "true"], check=False).returncode == 0:
        os.execve(unshare, [unshare, "-rn", sys.executable, *sys.argv], os.environ | {ISOLATED: "1"})
    if ISOLATED in os.environ:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            up = struct.pack("16sH14x", b"lo", IFF_UP)
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, up)


def about() -> str:
    cores = len(os.sched_getaffinity(0))
    isolated = "an own network namespace" if ISOLATED in os.environ else "shared loopback interface"
    return f"{isolated}, {cores} cores, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, python {platform.python_version()}, torch {version('torch')}"


class Run:
    """A run of `nodes` real supervisors with `workers` light workers each, on this machine."""

    def __init__(self, nodes: int, workers: int) -> None:
        self.nodes, self.workers = nodes, workers
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir="/dev/shm"))
        self.board = Board(self.folder / "board", nodes * workers * SPARE_SEATS)
        self.supervisors: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Run":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meeting = f"127.0.0.1:{probe.getsockname()[1]}"
        for node in range(self.nodes):
            several = [
                "--nnodes",
                str(self.nodes),
                "--node-rank",
                str(node),
                "--rendezvous",
                meeting,
                "--min-nodes",
                "1",
            ]
            command = [
                *(sys.executable, "-m", "holdfast", "run", "--workers", str(self.workers), "--recovery", "forward"),
                *("--out", str(self.folder / "run"), "--preload", "none", "--max-restarts", "100"),
                *([*several, "--lost-after", str(LOST_AFTER)] if self.nodes > 1 else []),
                *(str(HERE / "light_worker.py"), "--", str(self.folder / "board")),
            ]
            log = (self.folder / f"node-{node}.log").open("wb")
            self.supervisors.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        return self

    def __exit__(self, *_: object) -> None:
        pids = [entry.pid for entry in self.board.read().values()]
        for supervisor in self.supervisors:
            supervisor.kill()
        for pid in pids:
            kill(pid)
        for supervisor in self.supervisors:
            supervisor.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def world(self) -> int:
        return self.nodes * self.workers

    def present(self) -> dict[int, Entry]:
        """Return the entries of living processes of the newest attempt."""
        entries = self.board.read()
        attempt = max((entry.attempt for entry in entries.values()), default=0)
        return {seat: e for seat, e in entries.items() if e.attempt == attempt and is_alive(e.pid)}

    def wait(self, true: Callable[[dict[int, Entry]], bool], what: str) -> dict[int, Entry]:
        """Wait until `true` holds for the present entries, and return them."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            if any(supervisor.poll() not in (None, -signal.SIGKILL) for supervisor in self.supervisors):
                raise SystemExit(f"a supervisor ended while waiting for {what}:\n{self.logs()}")
            if true(entries := self.present()):
                return entries
            time.sleep(0.01)
        raise SystemExit(f"{what} did not come within {WITHIN:g} s ({len(self.present())} workers):\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-600:] for path in sorted(self.folder.glob("node-*.log"))[:4])


def measured(run: Run) -> dict[str, Phase]:
    """Return the cost of each phase of the run."""
    phases: dict[str, Phase] = {}
    with Meter(run) as meter:
        entries = run.wait(lambda entries: len(entries) == run.world, "the start")
        phases["start of all workers"] = meter.phase(max(entry.time for entry in entries.values()))
    with Meter(run) as meter:
        time.sleep(STEADY)
        phases[f"{STEADY:g} s in which nothing fails"] = meter.phase(time.monotonic())
    seat = run.world // 2
    with Meter(run) as meter:
        kill(entries[seat].pid)
        entries = run.wait(settled(entries, run.world - 1), "the membership without the lost worker")
        phases["loss of a worker to the new membership"] = meter.phase(max(entry.time for entry in entries.values()))
        entries = run.wait(complete(run.world), "the replacement")
        phases["loss of a worker to its replacement"] = meter.phase(max(entry.time for entry in entries.values()))
    if run.nodes == 1:
        fewer = min(FEW, run.world // 2)
        phases[f"scaling down to {fewer} workers"] = scaled(run, fewer)
        phases[f"scaling up to {run.world} workers"] = scaled(run, run.world)
    if run.nodes > 2:
        last = run.nodes - 1
        with Meter(run) as meter:
            lost = {seat for seat in entries if node_of(seat, run) == last}
            end_node(run, last, entries)
            entries = run.wait(settled({s: e for s, e in entries.items() if s not in lost}, 1), "life without the node")
            phases[f"loss of a node to the new membership (--lost-after {LOST_AFTER:g})"] = meter.phase(
                max(entry.time for entry in entries.values())
            )
        with Meter(run) as meter:
            attempt = max(entry.attempt for entry in entries.values())
            end_node(run, 0, entries)
            left = run.world - 2 * run.workers
            entries = run.wait(
                lambda found: len(found) == left and min(e.attempt for e in found.values()) > attempt, "a new keeper"
            )
            phases[f"loss of the keeper to the restart (--lost-after {LOST_AFTER:g})"] = meter.phase(
                max(entry.time for entry in entries.values())
            )
    return phases


def scaled(run: Run, workers: int) -> Phase:
    """Request another number of workers as `holdfast scale` does, and return the cost until they all train together."""
    with Meter(run) as meter:
        scale(run.folder / "run", workers)
        entries = run.wait(together(workers), f"{workers} workers that train")
        newest = max(entry.membership for entry in entries.values())
        return meter.phase(max(entry.time for entry in entries.values() if entry.membership == newest))


def settled(before: dict[int, Entry], least: int) -> Callable[[dict[int, Entry]], bool]:
    """Return a condition: all workers of `before` that live have joined a later membership, at least `least`."""
    newest = max(entry.membership for entry in before.values())

    def holds(entries: dict[int, Entry]) -> bool:
        known = [entry for seat, entry in entries.items() if seat in before]
        return len(known) >= least and all(entry.membership > newest for entry in known)

    return holds


def complete(world: int) -> Callable[[dict[int, Entry]], bool]:
    """Return a condition: `world` workers are in one membership of that many members."""

    def holds(entries: dict[int, Entry]) -> bool:
        numbers = {(entry.membership, entry.members) for entry in entries.values()}
        return len(entries) == world and len(numbers) == 1 and next(iter(numbers))[1] == world

    return holds


def together(workers: int) -> Callable[[dict[int, Entry]], bool]:
    """Return a condition: the newest membership has `workers` members, and as many processes are in it."""

    def holds(entries: dict[int, Entry]) -> bool:
        newest = max(entry.membership for entry in entries.values())
        members = [entry.members for entry in entries.values() if entry.membership == newest]
        return members == [workers] * workers

    return holds


def node_of(seat: int, run: Run) -> int:
    return seat // run.workers if seat < run.world else (seat - run.world) % run.nodes


def end_node(run: Run, node: int, entries: dict[int, Entry]) -> None:
    """Kill the supervisor and the workers of `node`, as if its machine had failed."""
    run.supervisors[node].kill()
    for seat, entry in entries.items():
        if node_of(seat, run) == node:
            kill(entry.pid)
    run.supervisors[node].wait()


class Meter:
    """A measurement of time, loopback traffic and processor time from its beginning."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> "Meter":
        self._began, self._traffic = time.monotonic(), traffic()
        self._used = {supervisor.pid: processor_seconds(supervisor.pid) for supervisor in self._run.supervisors}
        self._used |= {entry.pid: processor_seconds(entry.pid) for entry in self._run.board.read().values()}
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, end: float) -> Phase:
        """Return the cost from the beginning until `end` (the traffic and processor time: until now)."""
        moved, packets = (now - before for now, before in zip(traffic(), self._traffic, strict=True))
        supervisors = [supervisor.pid for supervisor in self._run.supervisors]
        pids = [*supervisors, *(entry.pid for entry in self._run.board.read().values())]
        used = {pid: processor_seconds(pid) - self._used.get(pid, 0.0) for pid in pids}
        keeper = supervisors[0]
        others = max((seconds for pid, seconds in used.items() if pid != keeper), default=0.0)
        return Phase(end - self._began, moved / 1e6, packets, used[keeper] if is_alive(keeper) else None, others)


def traffic() -> tuple[int, int]:
    """Return the bytes and packets that the loopback interface has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[1])


def processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def table(nodes: int, workers: int, phases: dict[str, Phase]) -> str:
    title = f"{nodes * workers} workers on {nodes} node{'s' * (nodes > 1)}"
    head = f"| {title} | seconds | MB | packets | processor seconds of the keeper | of the busiest other |\n|---|---:|---:|---:|---:|---:|"
    rows = [
        f"| {name} | {p.seconds:.2f} | {p.megabytes:.2f} | {p.packets:,} | {shown(p.keeper)} | {p.busiest:.2f} |"
        for name, p in phases.items()
    ]
    return "\n".join([head, *rows, ""])


def shown(seconds: float | None) -> str:
    return "lost" if seconds is None else f"{seconds:.2f}"


def slopes(results: dict[int, dict[str, Phase]]) -> list[str]:
    """Return, for each phase, how its traffic and the keeper's time grow from the second largest run to the largest."""
    lines = []
    names = dict.fromkeys(name for phases in results.values() for name in phases)
    for name in names:
        points = [(size, phases[name]) for size, phases in sorted(results.items()) if name in phases]
        if len(points) > 1:
            (small, first), (large, last) = points[-2:]
            growth = large / small
            parts = (("bytes", first.megabytes, last.megabytes), ("keeper", first.keeper, last.keeper))
            text = ", ".join(f"{what} x {b / a:.1f}" for what, a, b in parts if a and b)
            lines.append(f"{small} to {large} workers (x {growth:g}), {name}: {text}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
