"""One `holdfast serve train` on a cluster: its command, how far it has come by its history, and how it ended."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVERY = 0.01  # seconds between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and how."""

    workload: str
    nodes: int
    workers: int
    policy: str = "priority"
    fraction: str = "1/4"
    interval: int = 4
    recovery: str = "partial"
    iterations: int = 1000
    seed: int = 0

    def __str__(self) -> str:
        saves = "full" if self.policy == "full" else f"{self.policy} {self.fraction}"
        return f"{self.workload}, {self.nodes} nodes, {self.workers} workers, {saves}, {self.recovery}"


class Late(Exception):
    """What was waited for did not come within the deadline."""


class Command:
    """A served run that goes on, with a deadline for all of it."""

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
        """How the command ended, if it has."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """What the command has written."""
        return self._log.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """What the controller has told so far."""
        if not self.history.exists():
            return []
        return [json.loads(line) for line in self.history.read_bytes().split(b"\n")[:-1]]

    def iterations(self) -> int:
        """How many iterations are done: only what is new in the history is read."""
        with suppress(FileNotFoundError), self.history.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole)
            self._iterations += whole.count(b'"event": "iterate"')
        return self._iterations

    def await_iterations(self, count: int) -> bool:
        """Wait until so many are done; False if the command ended before."""
        return self.wait(lambda: self.iterations() >= count)

    def wait(self, condition: Any) -> bool:
        """Wait for a condition; False if the command ended before. Raises Late at the deadline."""
        while self.status is None:
            if condition():
                return True
            if time.monotonic() > self._deadline:
                raise Late
            time.sleep(EVERY)
        return False

    def end(self) -> int:
        """Wait until the command has ended; returns its status."""
        self.wait(lambda: False)
        self._file.close()
        return self._process.wait()

    def kill(self) -> None:
        """End it at once, with its stacks in its log."""
        if self.status is None:
            self._process.send_signal(6)
            self._process.wait(10)
        self._file.close()
