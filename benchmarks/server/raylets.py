"""A Ray cluster of more than one raylet on this machine, the processes of a served run on it, and ways to strike them."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

KINDS = ("node", "worker", "controller")
TITLES = {"ray::ServerNode": "node", "ray::Worker": "worker", "ray::Controller": "controller"}
OBJECTS = 256 << 20  # bytes of the object store of every raylet
NOTICED_WITHIN = 120.0  # seconds for Ray to notice that a raylet is dead
TRIES = 4  # attempts to start a raylet
GONE_WITHIN = 15.0  # seconds for the processes of a run to end after its command


class Raylets:
    """A head, on which drivers and their controllers run, and raylets that can be struck."""

    def __init__(self, count: int, objects: int = OBJECTS) -> None:
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ["PYTHONFAULTHANDLER"] = "1"  # on SIGABRT every process writes its stacks to its log
        from ray.cluster_utils import Cluster

        self._objects = objects
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=self._arguments())
        self._raylets = [self._started() for _ in range(count)]
        self._seen: dict[int, str] = {}

    @property
    def address(self) -> str:
        """The address to which drivers connect."""
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """The folder with the logs of all processes."""
        return Path(self._cluster.head_node.get_session_dir_path()) / "logs"

    def members(self, *kinds: str) -> dict[int, str]:
        """Return the processes of the current run: their kinds by process id."""
        found = {}
        for raylet in (self._cluster.head_node, *self._raylets):
            found |= _members(_pid(raylet))
        self._seen |= found
        return {pid: kind for pid, kind in found.items() if not kinds or kind in kinds}

    def training(self, history: Path) -> int:
        """Return the process of the active controller, which has the history open; a standby controller has not."""
        return next(pid for pid in self.members("controller") if history in _opened(pid))

    def inhabited(self) -> list[Any]:
        """Return the raylets that host nodes or workers of the run, but no controller."""
        there = [(raylet, set(_members(_pid(raylet)).values())) for raylet in self._raylets]
        return [raylet for raylet, kinds in there if kinds and "controller" not in kinds]

    def strike(self, raylet: Any, number: signal.Signals, everything: bool) -> list[str]:
        """Kill or suspend a raylet, alone or with every process on it; return the kinds of the run's processes on it."""
        members = _members(_pid(raylet))
        self._seen |= members
        for pid in (_pid(raylet), *(children(_pid(raylet)) if everything else ())):
            send(pid, number)
        return sorted(members.values())

    def renew(self, raylet: Any) -> None:
        """End the rest of a struck raylet, and start another in its place."""
        for pid in (*children(_pid(raylet)), _pid(raylet)):
            send(pid, signal.SIGKILL)
        raylet.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        self._cluster.worker_nodes.discard(raylet)
        self._raylets.remove(raylet)
        self._raylets.append(self._started())
        self._cluster.wait_for_nodes(NOTICED_WITHIN)

    def left_behind(self) -> list[str]:
        """Wait for the processes of ended runs; kill those left after `GONE_WITHIN` seconds, and describe them."""
        self.members()
        deadline = time.monotonic() + GONE_WITHIN
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            send(pid, signal.SIGKILL)
        self._seen.clear()
        return [f"{kind} (process {pid})" for pid, kind in left.items()]

    def dump_stacks(self) -> None:
        """Make every process of the run write its stacks to its log, and end."""
        for pid in self.members():
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGABRT)

    def shutdown(self) -> None:
        """End everything."""
        self._cluster.shutdown()

    def _alive(self) -> dict[int, str]:
        return {pid: kind for pid, kind in self._seen.items() if _kind(pid) == kind}

    def _started(self) -> Any:
        """Start a raylet, with retries: on a busy machine Ray may give up on it."""
        for _ in range(TRIES):
            try:
                return self._cluster.add_node(**self._arguments())
            except Exception as error:  # Ray raises nothing narrower
                print(f"a raylet did not start: {error}", file=sys.stderr, flush=True)
        raise SystemExit(f"no raylet started, tried {TRIES} times")

    def _arguments(self) -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": self._objects, "include_dashboard": False}


@contextmanager
def raylets(count: int, objects: int = OBJECTS) -> Iterator[Raylets]:
    """Run a cluster until the end of the block."""
    cluster = Raylets(count, objects)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return True if the process existed."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def children(parent: int) -> list[int]:
    """Return the child processes of `parent`."""
    return [pid for pid in _pids() if _parent(pid) == parent]


def _members(raylet: int) -> dict[int, str]:
    return {pid: kind for pid in children(raylet) if (kind := _kind(pid)) is not None}


def _kind(pid: int) -> str | None:
    """Return the kind of a process by the title that Ray gives it, or None if it is not part of a run or dead."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        return TITLES.get(title.partition(".")[0])
    return None


def _opened(pid: int) -> set[Path]:
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                found.add(entry.readlink())
    return found


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _pid(raylet: Any) -> int:
    return int(raylet.all_processes["raylet"][0].process.pid)
