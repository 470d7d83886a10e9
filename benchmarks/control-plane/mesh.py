"""Measure what gloo's full mesh costs: time, connections and open files, and requests to the store where ranks meet.

Run: python benchmarks/control-plane/mesh.py [--sizes 2,4,8,16] [--repeats 5]. The ranks are processes on this machine. They
meet at a TCPStore, create a `ProcessGroupGloo` of all ranks, as live recovery does, and all-reduce one number in it.
The requests of one more group are counted.
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]  # they are public

WITHIN = timedelta(minutes=1)
ESTABLISHED = "01"  # a state in /proc/net/tcp


class Counted(Store):
    """A store that counts the requests of one rank, and the bytes of the values that it writes and reads."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store, self.requests, self.bytes = store, 0, 0

    def set(self, key: str, value: Any) -> None:
        self.requests, self.bytes = self.requests + 1, self.bytes + len(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self.requests, self.bytes = self.requests + 1, self.bytes + len(value)
        return value

    def wait(self, keys: list[str], *within: Any) -> None:
        self.requests += 1
        self._store.wait(keys, *within)

    def has_extended_api(self) -> bool:
        return False


class Group(NamedTuple):
    """The cost of one group on one rank: its seconds, processor seconds, connections and open files."""

    seconds: float
    processor: float
    connections: int
    files: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, Linux {platform.release()}, python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}\n")
    names = "seconds to create a group | processor seconds of a rank | connections of a rank | new open files of a rank"
    print(
        f"| ranks | {names} | requests of a rank | MB of the requests of all ranks |\n|---:|---|---:|---:|---:|---:|---:|"
    )
    for size in given.sizes:
        print(row(size, measure(size, given.repeats)), flush=True)
    return 0


class Costs(NamedTuple):
    """What the groups of one rank cost, and the requests to the store, and their bytes, of one group."""

    groups: list[Group]
    requests: int
    bytes: int


def measure(size: int, repeats: int) -> list[Costs]:
    """Return what `repeats` groups cost each of `size` ranks."""
    context = multiprocessing.get_context("fork")
    ports, results = context.SimpleQueue(), context.SimpleQueue()
    host = context.Process(target=serve, args=(ports,), daemon=True)
    host.start()
    port = ports.get()
    ranks = [
        context.Process(target=work, args=(rank, size, port, repeats, results), daemon=True) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    costs = [results.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    host.kill()
    return costs


def serve(ports: "multiprocessing.SimpleQueue[int]") -> None:
    """Serve the store in a process of its own, because a process with threads must not be forked."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=WITHIN)
    ports.put(store.port)
    while True:
        time.sleep(1)


def work(rank: int, size: int, port: int, repeats: int, results: "multiprocessing.SimpleQueue[Costs]") -> None:
    """Create groups of all ranks, one at a time, and send what they cost."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=WITHIN)
    meet: Any = ProcessGroupGloo(PrefixStore("meet", store), rank, size, WITHIN)
    groups = [one_group(PrefixStore(f"group/{n}", store), rank, size, meet) for n in range(repeats)]
    counted = Counted(PrefixStore("counted", store))
    last = ProcessGroupGloo(counted, rank, size, WITHIN)
    results.put(Costs(groups, counted.requests, counted.bytes))
    meet.barrier().wait()
    del last  # not before: peers may still connect to it


def one_group(store: Store, rank: int, size: int, meet: Any) -> Group:
    """Create a group of all ranks, use it once, and return what it has cost and added. `meet` is another group."""
    meet.barrier().wait()
    connected, opened, processor, began = connections(), files(), time.process_time(), time.perf_counter()
    group: Any = ProcessGroupGloo(store, rank, size, WITHIN)
    group.allreduce([torch.ones(1)]).wait()
    seconds, used = time.perf_counter() - began, time.process_time() - processor
    meet.barrier().wait()  # all have connected
    return Group(seconds, used, connections() - connected, files() - opened)


def files() -> int:
    return len(descriptors())


def descriptors() -> list[str]:
    """Return what each open file of this process is, such as "socket:[1234]"."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(str(path.readlink()))
    return links


def connections() -> int:
    """Return the number of established TCP connections of this process."""
    sockets = {*descriptors()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(fields[3] == ESTABLISHED and f"socket:[{fields[9]}]" in sockets for fields in rows)


def row(size: int, costs: list[Costs]) -> str:
    slowest = sorted(max(group.seconds for group in repeat) for repeat in zip(*(c.groups for c in costs), strict=True))
    groups = [group for cost in costs for group in cost.groups]
    processor = statistics.median(group.processor for group in groups)
    spread = f"{statistics.median(slowest):.3f} ({slowest[0]:.3f} to {slowest[-1]:.3f})"
    most = max(group.connections for group in groups), max(group.files for group in groups)
    asked, moved = max(cost.requests for cost in costs), sum(cost.bytes for cost in costs) / 1e6
    return f"| {size} | {spread} | {processor:.3f} | {most[0]} | {most[1]} | {asked} | {moved:.3f} |"


if __name__ == "__main__":
    sys.exit(main())
