"""How a run is doing, for whoever watches: one line that changes on a terminal, plain lines elsewhere.

It reads the history files as they grow, and nothing else of the run.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from holdfast.cost.formulas import goodput
from holdfast.supervise.output import Echo
from holdfast.supervise.verdict import count

REFRESH = 0.25
PLAIN_REFRESH = 10.0


@dataclass(slots=True)
class Tally:
    """What the events so far add up to, from the moment we began to watch."""

    began: float
    step: int = 0
    steps: int | None = None
    save_every: int | None = None
    committed: int = 0
    committed_before: int = 0
    restored: int = 0
    restarts: int = 0
    workers: int = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event into account."""
        kind = event.get("event")
        new = float(event.get("time", 0.0)) >= self.began
        if kind == "plan":
            self.steps = event["samples"] // event["batch"] * event["epochs"]
            self.save_every = event["save_every"]
        elif kind == "step":
            self.step = event["step"] + 1
        elif kind == "recover":
            self.step = self.restored = event["restored"] or 0
        elif kind == "commit":
            self.committed = max(self.committed, event["step"])
            self.committed_before = self.committed_before if new else self.committed
        elif kind in ("launch", "restart"):
            self.workers = event["workers"]
            self.restarts += new and kind == "restart"

    @property
    def in_flight(self) -> int:
        """Saves that were due by now and are not committed yet."""
        if not self.save_every:
            return 0
        return max(0, self.step // self.save_every - max(self.committed, self.restored) // self.save_every)

    def line(self, now: float) -> str:
        """All of it in one line."""
        rate = goodput(self.committed - self.committed_before, max(now - self.began, 1e-3))
        done = f"step {self.step}" + (f" of {self.steps}" if self.steps else "")
        return " · ".join(
            [
                done,
                f"goodput {rate:.1f} steps/s",
                count(self.restarts, "restart"),
                f"{count(self.in_flight, 'save')} in flight",
                f"committed {self.committed}",
                count(self.workers, "worker"),
            ]
        )


class Growing:
    """The events of one history file, as they are appended."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The events since the last call; a line that is not whole yet waits for the next."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with suppress(ValueError):  # the audit reports damage, not the view
                    yield json.loads(line)


class View:
    """Shows the tally, what the workers print, and lines of the supervisor's own."""

    def __init__(self, console: Console, history: Path, supervisor: str) -> None:
        self._console = console
        self._files = [Growing(history / f"{who}.jsonl") for who in (supervisor, "rank-0")]
        self._tally = Tally(time.time())
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = time.monotonic()
        self.echo = Echo(self._print_out, self._print_err)

    def say(self, line: str, style: str = "") -> None:
        """One line of the supervisor's own."""
        text = Text(f"holdfast: {' '.join(line.split())}", style=style)
        self._console.print(text, soft_wrap=True)

    def show(self, title: str, text: str) -> None:
        """Several lines as they are, such as a traceback, under a title."""
        self.say(title, style="bold red")
        self._print_err(text.rstrip("\n"))

    def refresh(self, *, now: bool = False) -> None:
        """Copy new output; and show the tally, if it is time."""
        self.echo.copy()
        moment = time.monotonic()
        if not now and moment - self._shown < (REFRESH if self._live else PLAIN_REFRESH):
            return
        self._shown = moment
        for file in self._files:
            for event in file.new():
                with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):  # another version's event
                    self._tally.add(event)
        line = self._tally.line(time.time())
        if self._live:
            self._live.update(Text(line, style="cyan"), refresh=True)
        elif self._tally.step:
            self.say(line)

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.echo.copy(last=True)
        if self._live:
            self._live.stop()

    def _print_out(self, text: str) -> None:
        """To stdout, which may be a file; on one terminal with the live line, above that line."""
        if self._live and sys.stdout.isatty():
            self._print_err(text)
        else:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _print_err(self, text: str) -> None:
        if self._live:
            self._console.print(Text.from_ansi(text), soft_wrap=True)
        else:
            self._console.file.write(text + "\n")  # byte for byte: a log may hold tabs and colours
            self._console.file.flush()
