"""Handles of supervisors and commands: their output, events and results, and helpers that wait for processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.history.log import Event, read_history

SUPPORT = Path(__file__).parent
TRAINEE = SUPPORT / "torch_only_script.py"
WITHIN = 120.0


class Job:
    """A job of the warm process: a fork of it, with a folder for its output and its result."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid, self.folder = pid, folder

    @property
    def over(self) -> bool:
        return (self.folder / "result.json").exists()

    def result(self, within: float = WITHIN) -> dict[str, Any]:
        """Wait for the job to end and return its result."""
        wait_until(lambda: self.over, f"the job to end; it wrote\n{self.stderr or self.stdout}", within)
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    @property
    def stderr(self) -> str:
        return self._read("stderr")

    @property
    def stdout(self) -> str:
        return self._read("stdout")

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Command(Job):
    """A `holdfast` command in a separate process."""

    def wait(self, within: float = WITHIN) -> int:
        """Wait for the command to end and return its exit status."""
        return int(self.result(within)["exit_status"])


class Supervisor(Job):
    """A supervisor in a separate process."""

    def __init__(self, pid: int, folder: Path, out: Path) -> None:
        super().__init__(pid, folder)
        self.out = out

    def events(self, kind: str, who: str = "supervisor") -> list[Event]:
        path = self.out / "history" / f"{who}.jsonl"
        return [event for event in read_history(path).events if event.kind == kind] if path.exists() else []

    def notes(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the notes of a kind that `torch_only_script` wrote on this rank."""
        path = self.out / f"notes-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [note for note in map(json.loads, lines) if note["event"] == kind]


Start = Callable[..., Supervisor]
StartCommand = Callable[..., Command]
RunScript = Callable[..., None]


@contextmanager
def driving(*modules: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has imported torch and `modules` and runs supervisors; its children die with it."""
    command = [sys.executable, str(SUPPORT / "warm_driver.py"), *modules]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def fork(driver: subprocess.Popen[str], job: dict[str, Any]) -> int:
    """Make the warm process `driver` fork for a job; return the id of the new process."""
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(json.dumps(job) + "\n")
    driver.stdin.flush()
    return int(driver.stdout.readline())


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, in ascending order."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # the process ended meanwhile
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {pid})


def wait_until(true: Callable[[], bool], what: str, within: float = WITHIN) -> None:
    """Poll until `true` returns True; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, f"waited {within:g} s for {what}"
        time.sleep(0.02)
