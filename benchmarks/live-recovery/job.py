"""A run seen from outside: the command, its processes in /proc, and its histories as far as they are written."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-c", "from holdfast.cli import main; main()")
MARKER = "HOLDFAST_LIVE_RECOVERY"  # an environment variable that only the processes of a job inherit
LOOK = 0.002
NO_PROGRESS = 90.0  # seconds without a new line that count as a hang; far longer than every deadline of the command
GONE_WITHIN = 20.0
interrupted = threading.Event()
"""Set on an interrupt: a thread that waits for a job gives up, and ends the job."""


class Hung(Exception):
    """The run makes no progress, or takes too long."""


class Ended(Exception):
    """The command has ended while `Job.wait` waited for something else."""


class Tail:
    """The history of one rank, read incrementally up to the last complete line."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.attempt, self.launched, self.pid, self.step, self.world = 0, 0, 0, -1, 0
        self.events: list[dict[str, Any]] = []

    def look(self) -> "Tail":
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
            for line in whole.splitlines():
                self._heed(json.loads(line))
            self._offset += len(whole) + 1 if whole else 0
        return self

    def _heed(self, event: dict[str, Any]) -> None:
        if event["event"] == "attempt":
            self.attempt, self.launched = event["attempt"], event["world"]
            self.pid, self.step = event["pid"], -1
        elif event["event"] == "step":
            self.step, self.world = event["step"], event["world"]
            event["pid"] = self.pid
        self.events.append(event)


class Job:
    """One command in a folder of its own; if `changes`, each attempt may have another number of workers."""

    def __init__(self, folder: Path, workers: int, command: list[str], *, limit: float, changes: bool = False) -> None:
        folder.mkdir(parents=True)
        self.folder, self.workers, self.command = folder, workers, command
        self._limit, self._changes = limit, changes
        self.out, self.control, self.log = folder / "run", folder / "control", folder / "command.log"
        self.notes = folder / "notes"  # for scripts that note their own steps
        self.control.mkdir()
        self.notes.mkdir()
        self.tails = [Tail(self.out / "history" / f"rank-{number}.jsonl") for number in range(workers)]
        self.left: list[str] = []  # processes that outlived a killed supervisor
        self.seen: set[int] = set()  # ids of processes of the job, as far as `processes` has seen them
        self._id = f"{os.getpid()}-{time.monotonic_ns()}"
        self._ends = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, device: str = "cpu") -> None:
        """Start the command; with `device` 'cpu' it sees no GPU."""
        environment = os.environ | {MARKER: self._id, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._ends = self._ends or time.monotonic() + self._limit
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def start_again(self) -> None:
        """Start the command again after its supervisor was killed, when all of its processes are gone."""
        assert self._process is not None
        self._process.wait()
        self.left += self.gone()
        self.start()

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the command (negative for a signal), or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def look(self) -> list[Tail]:
        """Read on in the history of every rank, and return them."""
        return [tail.look() for tail in self.tails]

    def children(self) -> set[int]:
        """Return the child processes of the supervisor."""
        with suppress(OSError):
            return set(map(int, Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text().split()))
        return set()

    def pids(self) -> dict[int, int]:
        """Return the process ids of the running workers by rank."""
        here = self.children()
        return {number: tail.pid for number, tail in enumerate(self.look()) if tail.pid in here and _runs(tail.pid)}

    def newest(self) -> list[Tail]:
        """Return the ranks of the newest attempt."""
        tails = self.look()
        attempt = max(tail.attempt for tail in tails)
        return [tail for tail in tails if tail.attempt == attempt]

    def is_whole(self, steps: int, since: int) -> bool:
        """Return True if all workers run, and have trained `steps` steps together after step `since`."""
        tails = self.newest()
        workers = tails[0].launched if self._changes else self.workers
        return len(self.pids()) == workers and all(
            tail.step >= since + steps and tail.world == workers for tail in tails
        )

    def reached(self) -> int:
        """Return the newest step that any rank has recorded in the newest attempt."""
        return max(tail.step for tail in self.newest())

    def wait(self, condition: Callable[[], bool]) -> None:
        """Poll until `condition` is true; raise Ended if the command ends, and Hung if it makes no progress."""
        seen, deadline = -1, 0.0
        while not condition():
            now = time.monotonic()
            size = self._recorded()
            if size != seen or not size:  # at first the processes import torch, for as long as it takes
                seen, deadline = size, now + NO_PROGRESS
            if self.status is not None:
                raise Ended
            if now > deadline:
                raise Hung(f"no process wrote a line for {NO_PROGRESS:g} s; the last recorded step is {self.reached()}")
            if interrupted.is_set():
                raise Hung("interrupted")
            if now > self._ends:
                raise Hung(f"not finished after {self._limit:g} s; the last step is {self.reached()}")
            time.sleep(LOOK)

    def await_end(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        with suppress(Ended):
            self.wait(lambda: False)
        assert self.status is not None
        return self.status

    def command_line(self, *arguments: object) -> None:
        """Run another command of holdfast, such as `scale`."""
        subprocess.run([*COMMAND, *map(str, arguments)], check=False, capture_output=True, timeout=60)

    def _recorded(self) -> int:
        """Return the number of bytes that the workers have written to histories and notes."""
        files = [*(self.out / "history").glob("rank-*"), *self.notes.iterdir()]
        return sum(file.stat().st_size for file in files)

    def processes(self) -> list[int]:
        """Return the ids of all processes of the job."""
        folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
        running = [int(folder.name) for folder in folders if self._is_mine(folder)]
        self.seen.update(running)
        return running

    def _is_mine(self, folder: Path) -> bool:
        with suppress(OSError):
            return f"{MARKER}={self._id}\0".encode() in (folder / "environ").read_bytes()
        return False

    def gone(self) -> list[str]:
        """Wait for the processes of an ended command; kill those left after `GONE_WITHIN` seconds, and describe them."""
        deadline = time.monotonic() + GONE_WITHIN
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            kill(pid)
        return [f"process {pid} was left behind" for pid in left]

    def dump_and_kill(self, *, stacks: bool = True) -> None:
        """Kill all processes of the run; with `stacks`, each first writes its stacks to its log, to explain a hang."""
        if stacks:
            for pid in self.processes():
                kill(pid, signal.SIGABRT)
            time.sleep(2.0)
        for pid in self.processes():
            kill(pid)
        assert self._process is not None
        self._process.wait()

    def last_lines(self, count: int = 3) -> str:
        """Return the last lines that the command printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(line.strip() for line in lines[-count:])


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal; return True if the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
