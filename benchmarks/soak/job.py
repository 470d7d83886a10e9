"""A run seen from outside: the command, its processes in /proc, and its progress by the tails of its histories."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from schedule import STEPS, Plan

SCRIPT = Path(__file__).with_name("train.py")
MARKER = "HOLDFAST_SOAK"  # an environment variable that only the processes of a job inherit
COMMAND = (sys.executable, "-c", "from holdfast.cli import main; main()")
LOOK = 0.001
NO_PROGRESS = 120.0  # seconds without a new line in any history that count as a hang; far longer than every deadline of the command
GONE_WITHIN = 20.0
HANG_TIMEOUT = 4.0
KEEP_LAST = 2


class Hung(Exception):
    """The run makes no progress."""


class Ended(Exception):
    """The command has ended while `Job.wait` waited for something else."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the command ended with status {status}")
        self.status = status


class Tail:
    """The newest events of one rank, read incrementally up to the last complete line of its history."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.attempt, self.pid, self.step, self.recovered = 0, 0, -1, 0

    def look(self) -> "Tail":
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
            for line in whole.splitlines():
                self._heed(json.loads(line))
            self._offset += len(whole) + 1 if whole else 0
        return self

    def _heed(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "attempt":
                self.attempt, self.pid, self.step = event["attempt"], event["pid"], -1
            case "recover":
                self.recovered = event["attempt"]
            case "step":
                self.step = event["step"]


class Job:
    """One run in its own folder, started again after each end."""

    def __init__(self, plan: Plan, folder: Path, options: list[str]) -> None:
        self.plan, self.folder, self.out = plan, folder, folder / "run"
        self.control, self.small_disk = folder / "control", folder / "disk"
        self.control.mkdir(parents=True)
        self.checkpoints = self.small_disk / "checkpoints" if plan.small_disk else self.out / "checkpoints"
        self._options = options
        self._id = f"{os.getpid()}-{folder.name}"
        self._tails = [Tail(self.out / "history" / f"rank-{rank}.jsonl") for rank in range(plan.workers)]
        self._process: subprocess.Popen[bytes] | None = None
        self._struck_attempt, self._struck_newest = 0, 0

    @property
    def log(self) -> Path:
        return self.folder / "command.log"

    @property
    def command(self) -> list[str]:
        plan = self.plan
        task = {
            "model": plan.model,
            "loaders": plan.loaders,
            "steps": STEPS,
            "pause": 0.003,
            "control": str(self.control),
        }
        options = ["--workers", str(plan.workers), "--save-every", str(plan.save_every), "--writer", plan.writer]
        if plan.small_disk:
            options += ["--checkpoints", str(self.checkpoints)]
        if plan.fault:
            options += ["--inject", f"{plan.fault}@{'+'.join(map(str, plan.fault_at))}"]
        options += [*self._options, "--out", str(self.out)]
        return [*COMMAND, "run", *options, str(SCRIPT), "--", json.dumps(task)]

    def start(self) -> None:
        """Start the command, for the first time or again."""
        environment = os.environ | {MARKER: self._id, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    @property
    def supervisor(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the command (negative for a signal), or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def members(self) -> list[int]:
        """Return the ids of all processes of the job."""
        return [
            int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and self._is_mine(folder)
        ]

    def _is_mine(self, folder: Path) -> bool:
        with suppress(OSError):
            return f"{MARKER}={self._id}\0".encode() in (folder / "environ").read_bytes()
        return False

    def children(self, pid: int | None = None) -> list[int]:
        """Return the child processes of `pid`, by default of the supervisor."""
        pid = self.supervisor if pid is None else pid
        with suppress(OSError):
            return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        return []

    def pid(self, rank: int) -> int:
        """Return the process id of the worker of `rank`, or 0 if it does not run."""
        pid = self._tails[rank].look().pid
        return pid if pid in self.children() else 0

    def attempt(self, rank: int = 0) -> int:
        """Return the last attempt that `rank` has begun."""
        return self._tails[rank].look().attempt

    def recovered(self, rank: int) -> int:
        """Return the last attempt in which `rank` has restored its state."""
        return self._tails[rank].look().recovered

    def step(self) -> int:
        """Return the newest step that rank 0 has recorded in its attempt."""
        return self._tails[0].look().step

    def saves(self) -> dict[int, bool]:
        """Return the steps that have a folder, each with True if the folder has a manifest."""
        found = {}
        with suppress(OSError):
            for folder in self.checkpoints.iterdir():
                if folder.name.startswith("step-"):
                    found[int(folder.name[5:])] = os.path.lexists(folder / "manifest.json")
        return found

    def newest(self) -> int:
        """Return the newest committed step."""
        return max((step for step, committed in self.saves().items() if committed), default=0)

    def is_saving(self) -> bool:
        """Return True if the newest folder of a step has no manifest yet."""
        saves = self.saves()
        return bool(saves) and not saves[max(saves)]

    def note_strike(self, *, restarts: bool = True) -> None:
        """Remember the progress of the run: the next strike waits for more, and for a restart unless `restarts` is False."""
        attempts = (self.attempt(rank) for rank in range(self.plan.workers))
        self._struck_attempt = max(attempts) if restarts else 0
        self._struck_newest = max(self._struck_newest, self.newest())

    def await_step(self, step: int) -> None:
        """Wait until training has continued after the last strike, has saved a newer step, and has reached `step`."""
        self.wait(
            lambda: (
                self.attempt() > self._struck_attempt
                and self.step() >= step
                and self.newest() > self._struck_newest
                and all(self.pid(rank) for rank in range(self.plan.workers))
            )
        )

    def await_start(self, old: set[int], count: int = 1) -> list[int]:
        """Wait until `count` workers run that are not in `old`."""
        self.wait(lambda: len(set(self.children()) - old) >= count)
        return sorted(set(self.children()) - old)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Poll until `condition` is true; raise Ended if the command ends, and Hung if it makes no progress."""
        seen, deadline = -1, 0.0
        while not condition():
            now = time.monotonic()
            if (size := self._recorded()) != seen:
                seen, deadline = size, now + NO_PROGRESS
            if self.status is not None:
                raise Ended(self.status)
            if now > deadline:
                raise Hung(
                    f"no line in any history for {NO_PROGRESS:g} s, in attempt {self.attempt()} at {self.step()}"
                )
            time.sleep(LOOK)

    def _recorded(self) -> int:
        with suppress(OSError):
            return sum(file.stat().st_size for file in (self.out / "history").iterdir())
        return 0

    def await_end(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        try:
            self.wait(lambda: False)
        except Ended as end:
            return end.status
        raise AssertionError("unreachable")

    def gone(self) -> list[str]:
        """Wait for the processes and locks of an ended command; kill and describe those left after `GONE_WITHIN` seconds."""
        deadline = time.monotonic() + GONE_WITHIN
        # An ending process loses its environment before its locks, so a lock may outlast the last visible process.
        while ((left := self.members()) or not self._is_unlocked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        words = [f"process {pid}: {_command_line(pid)}" for pid in left]
        for pid in left:
            kill(pid, signal.SIGKILL)
        return words or ([] if self._is_unlocked() else ["the folder is still locked"])

    def _is_unlocked(self) -> bool:
        for path in self.out.glob(".*.lock"):
            with path.open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
        return True

    def dump_and_kill(self) -> None:
        """Kill all processes of the run; each first writes its stacks to its log."""
        for pid in self.members():
            kill(pid, signal.SIGABRT)
        time.sleep(2.0)
        for pid in self.members():
            kill(pid, signal.SIGKILL)


def kill(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return True if the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "already gone"
