"""One `holdfast serve train` on a cluster: its command, its progress by its history, and its end."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVERY = 0.01  # seconds between two polls


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The workload and the options of a run."""

    workload: str
    nodes: int
    workers: int
    policy: str = "priority"
    fraction: str = "1/4"
    interval: int = 4
    restore: str = "partial"
    iterations: int = 1000
    seed: int = 0

    def __str__(self) -> str:
        saves = "full" if self.policy == "full" else f"{self.policy} {self.fraction}"
        return f"{self.workload}, {self.nodes} nodes, {self.workers} workers, {saves}, {self.restore}"


class Late(Exception):
    """The deadline passed before the awaited condition became true."""


class Command:
    """A served run, with a deadline for its end."""

    def __init__(self, plan: Plan, address: str, out: Path, seconds: float) -> None:
        self.out, self._deadline = out, time.monotonic() + seconds
        self._read = self._iterations = 0
        self.history = out / "history" / "controller.jsonl"
        self._log = out.with_suffix(".log")
        self._file = self._log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", "from holdfast.cli import main; main()", "serve", "train"]
            + [f"--address={address}", f"--out={out}"]
            + [f"--{name}={getattr(plan, name)}" for name in plan.__dataclass_fields__],
            stdout=self._file,
            stderr=self._file,
        )

    @property
    def status(self) -> int | None:
        """The exit status of the command, or None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Everything that the command has printed."""
        return self._log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the controller has recorded so far."""
        if not self.history.exists():
            return []
        return [json.loads(line) for line in self.history.read_bytes().split(b"\n")[:-1]]

    def iterations(self) -> int:
        """Return the number of finished iterations; only the new part of the history is read."""
        with suppress(FileNotFoundError), self.history.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole)
            self._iterations += whole.count(b'"event": "iterate"')
        return self._iterations

    def await_iterations(self, count: int) -> bool:
        """Wait until `count` iterations are done; return False if the command ended before."""
        return self.wait(lambda: self.iterations() >= count)

    def wait(self, condition: Any) -> bool:
        """Wait for a condition; return False if the command ended before, and raise Late at the deadline."""
        while self.status is None:
            if condition():
                return True
            if time.monotonic() > self._deadline:
                raise Late
            time.sleep(EVERY)
        return False

    def end(self) -> int:
        """Wait for the end of the command, and return its status."""
        self.wait(lambda: False)
        self._file.close()
        return self._process.wait()

    def kill(self) -> None:
        """End the command at once, with its stacks in its log."""
        if self.status is None:
            self._process.send_signal(6)
            self._process.wait(10)
        self._file.close()
