"""A run seen from outside: the command, its processes by /proc, and what its histories say, as far as they are written."""

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
MARKER = "HOLDFAST_LIVE_RECOVERY"  # a variable that all processes of a job inherit, and nobody else has
LOOK = 0.002
NO_PROGRESS = 90.0  # seconds in which nobody writes a line: a hang; far beyond every deadline of the command's own
GONE_WITHIN = 20.0
interrupted = threading.Event()
"""Set when nothing is wanted any more: whoever waits for a job gives up, and ends it."""


class Hung(Exception):
    """The run makes no progress, or takes too long."""


class Ended(Exception):
    """The command has ended while something else was waited for."""


class Tail:
    """One member's history: read as far as there are whole lines, and on from there."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.attempt, self.pid, self.step, self.world = 0, 0, -1, 0
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
            self.attempt, self.pid, self.step = event["attempt"], event["pid"], -1
        elif event["event"] == "step":
            self.step, self.world = event["step"], event["world"]
            event["pid"] = self.pid
        self.events.append(event)


class Job:
    """One command in a folder of its own."""

    def __init__(self, folder: Path, workers: int, command: list[str], *, limit: float) -> None:
        folder.mkdir(parents=True)
        self.folder, self.workers, self.command, self._limit = folder, workers, command, limit
        self.out, self.control, self.log = folder / "run", folder / "control", folder / "command.log"
        self.notes = folder / "notes"  # for scripts that say themselves what they do
        self.control.mkdir()
        self.notes.mkdir()
        self.tails = [Tail(self.out / "history" / f"rank-{number}.jsonl") for number in range(workers)]
        self._id = f"{os.getpid()}-{time.monotonic_ns()}"
        self._ends = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, device: str = "cpu") -> None:
        """Give the command; where it is to run on processors, it sees no GPU."""
        environment = os.environ | {MARKER: self._id, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._ends = time.monotonic() + self._limit
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the command, minus the signal that killed it; nothing while it runs."""
        assert self._process is not None
        return self._process.poll()

    def look(self) -> list[Tail]:
        """What every member has on record by now."""
        return [tail.look() for tail in self.tails]

    def children(self) -> set[int]:
        """The processes that the supervisor has forked and that are left."""
        with suppress(OSError):
            return set(map(int, Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text().split()))
        return set()

    def pids(self) -> dict[int, int]:
        """The workers that run, by their numbers."""
        here = self.children()
        return {number: tail.pid for number, tail in enumerate(self.look()) if tail.pid in here and _runs(tail.pid)}

    def is_whole(self, steps: int, since: int) -> bool:
        """Whether all members are there, and each has trained so many steps since, with all the others."""
        tails = self.look()
        return len(self.pids()) == self.workers and all(
            tail.step >= since + steps and tail.world == self.workers for tail in tails
        )

    def reached(self) -> int:
        """The newest step that any member has put on record."""
        return max(tail.step for tail in self.look())

    def wait(self, true: Callable[[], bool]) -> None:
        """Look until it is so, as long as the run makes progress and has time left."""
        seen, deadline = -1, 0.0
        while not true():
            now = time.monotonic()
            if (
                size := self._recorded()
            ) != seen or not size:  # at first everybody imports torch, for as long as it takes
                seen, deadline = size, now + NO_PROGRESS
            if self.status is not None:
                raise Ended
            if now > deadline:
                raise Hung(f"nobody wrote a line for {NO_PROGRESS:g} s; the last step on record is {self.reached()}")
            if interrupted.is_set():
                raise Hung("interrupted")
            if now > self._ends:
                raise Hung(f"not over after {self._limit:g} s; the last step is {self.reached()}")
            time.sleep(LOOK)

    def await_end(self) -> int:
        """The exit status of the command, once it has ended."""
        with suppress(Ended):
            self.wait(lambda: False)
        assert self.status is not None
        return self.status

    def _recorded(self) -> int:
        """How much the workers have written of what they did."""
        files = [*(self.out / "history").glob("rank-*"), *self.notes.iterdir()]
        return sum(file.stat().st_size for file in files)

    def processes(self) -> list[int]:
        """All processes of the job that run."""
        return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and self._is_mine(each)]

    def _is_mine(self, folder: Path) -> bool:
        with suppress(OSError):
            return f"{MARKER}={self._id}\0".encode() in (folder / "environ").read_bytes()
        return False

    def gone(self) -> list[str]:
        """What is left of the job some time after the command has ended, in words; it is killed then."""
        deadline = time.monotonic() + GONE_WITHIN
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            kill(pid)
        return [f"process {pid} was left behind" for pid in left]

    def dump_and_kill(self, *, stacks: bool = True) -> None:
        """End a run, such as one that hangs: then every process leaves its stacks in its log first."""
        if stacks:
            for pid in self.processes():
                kill(pid, signal.SIGABRT)
            time.sleep(2.0)
        for pid in self.processes():
            kill(pid)
        assert self._process is not None
        self._process.wait()

    def last_lines(self, count: int = 3) -> str:
        """What the command said last."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " | ".join(line.strip() for line in lines[-count:])


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal, and say whether there was anybody to take it."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
