"""How a run is doing, for whoever watches: one line that changes on a terminal, plain lines elsewhere.

It reads what is added to the history files while it watches, and nothing else of the run. Nothing that happens to those
files, or to whoever reads what is printed, ends the run: the view then shows less.

What the workers print, shown as they print it: each writes a file of its own, and the supervisor copies new lines.

A progress bar such as tqdm's writes over its own line and ends it only when it is full: what stands in it by now can be
asked for.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from holdfast.cost.formulas import goodput
from holdfast.events import Recover, What
from holdfast.history.follow import Growing
from holdfast.history.lineage import Lineage
from holdfast.supervise.restart_policy import RestartPolicy
from holdfast.supervise.verdict import count

Show = Callable[[str], None]
LONGEST = 1 << 16  # bytes of a line that is written over again and again: more than that are not kept


class Tail:
    """The new lines of one growing file."""

    def __init__(self, path: Path, show: Show) -> None:
        self.path, self._show = path, show
        self._file: BufferedReader | None = None
        self._rest = b""

    @property
    def bar(self) -> str:
        """What stands in a line that is written over and has not ended; nothing if there is no such line."""
        _, over, now = self._rest.rstrip(b"\r").rpartition(b"\r")
        return now.decode(errors="replace") if over else ""

    def copy(self, *, last: bool = False) -> None:
        """Show the lines that are whole by now; of a file that has ended also the rest."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:  # not there yet, or its worker has no log
                return
        text = self._rest + self._read()
        end = len(text) if last else text.rfind(b"\n") + 1
        self._rest = text[end:]
        if len(self._rest) > LONGEST and (over := self._rest.rfind(b"\r", 0, -1)) > 0:
            self._rest = self._rest[over:]
        if end:
            self._show(text[:end].decode(errors="replace").removesuffix("\n"))
        if last:
            self._file.close()

    def _read(self) -> bytes:
        try:
            return self._file.read() if self._file else b""
        except OSError:  # a disk that cannot be read is no reason to stop
            return b""


class Echo:
    """The output of all workers of an attempt, also of those that take the place of others."""

    def __init__(self, out: Show, err: Show) -> None:
        self._out, self._err = out, err
        self._tails: list[Tail] = []

    def bars(self) -> list[str]:
        """The progress bars that workers draw now, each once, in the order in which they were started."""
        return list(dict.fromkeys(bar for tail in self._tails if (bar := tail.bar.strip())))

    def follow(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show the rest of the last attempt's output, and from now on that of another."""
        self.copy(last=True)
        self.show_too(printed)

    def show_too(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show these files from now on, beside those that are shown already."""
        shown = {tail.path for tail in self._tails}
        new = [pair for pair in printed if not shown & {*pair}]
        self._tails += [tail for out, err in new for tail in (Tail(out, self._out), Tail(err, self._err))]

    def leave(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show what these files hold by now, and nothing that comes later."""
        paths = {path for pair in printed for path in pair}
        for tail in self._tails:
            if tail.path in paths:
                tail.copy(last=True)
        self._tails = [tail for tail in self._tails if tail.path not in paths]

    def copy(self, *, last: bool = False) -> None:
        """Show what is new."""
        for tail in self._tails:
            tail.copy(last=last)
        if last:
            self._tails = []


REFRESH = 0.25
PLAIN_REFRESH = 10.0
MOST_BARS = 4  # of progress, of the first ranks that draw one


@dataclass(slots=True)
class Tally:
    """What the events add up to since we began to watch."""

    began: float
    tries: RestartPolicy
    run: Lineage = field(default_factory=Lineage)
    _first: int | None = None  # the steps that were committed when we began

    def add(self, what: What) -> None:
        """Take one event into account."""
        self.run.add(what)
        if isinstance(what, Recover) and self._first is None:
            self._first = what.restored or 0

    @property
    def committed(self) -> int:
        """The steps that would come back after a failure now."""
        return max(self.run.committed, self.run.restored or 0)

    @property
    def in_flight(self) -> int:
        """Saves that were due by now and are not committed yet."""
        if self.run.plan is None or self.run.plan.save_every < 1:
            return 0
        every = self.run.plan.save_every
        return max(0, self.run.reached // every - self.committed // every)

    def line(self, now: float) -> str:
        """All of it in one line."""
        rate = goodput(max(0, self.committed - (self._first or 0)), max(now - self.began, 1e-3))
        left = f"{count(self.run.restarts, 'restart')}, {self.tries.left(self.committed)} left"
        return " · ".join(
            [
                f"step {self.run.reached}" + (f" of {self._steps}" if self._steps else ""),
                f"goodput {rate:.1f} steps/s",
                left,
                f"{count(self.in_flight, 'save')} in flight",
                f"committed {self.committed}",
                count(self.run.workers, "worker"),
            ]
        )

    @property
    def _steps(self) -> int:
        plan = self.run.plan
        return (plan.limit or plan.samples // plan.batch * plan.epochs) if plan and plan.batch else 0


class View:
    """Shows the tally, what the workers print, and lines of the supervisor's own."""

    def __init__(self, console: Console, history: Path, supervisor: str, tries: RestartPolicy) -> None:
        self._console = console
        self._files = [Growing(history / f"{who}.jsonl") for who in (supervisor, "rank-0")]
        self._tally = Tally(time.time(), tries)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = time.monotonic()
        self._warned: set[str] = set()
        self._deaf: set[str] = set()
        self.echo = Echo(self._print_out, self._print_err)

    def say(self, line: str, style: str = "") -> None:
        """One line of the supervisor's own."""
        line = f"holdfast: {' '.join(line.split())}"
        if self._live:
            self._try("err", lambda: self._console.print(Text(line, style=style), soft_wrap=True))
        else:
            self._print_err(line)

    def warn(self, line: str) -> None:
        """A line that is said once, however often it is true."""
        if line not in self._warned:
            self._warned.add(line)
            self.say(line, style="yellow")

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
                self._tally.add(event.what)
        line = self._tally.line(time.time())
        if live := self._live:
            self._try("err", lambda: live.update(Group(Text(line, style="cyan"), *self._bars()), refresh=True))
            return
        if self._tally.run.reached:
            self.say(line)
        for bar in self.echo.bars()[:1]:  # that of the first rank: the others draw the same
            self._print_err(bar)

    def _bars(self) -> list[Text]:
        """The progress bars of the workers, cut off where the terminal ends: lines that wrap cannot be drawn over."""
        return [Text.from_ansi(bar, no_wrap=True, overflow="ellipsis", end="") for bar in self.echo.bars()[:MOST_BARS]]

    def __enter__(self) -> "View":
        if self._live:
            self._try("err", self._live.start)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.echo.copy(last=True)
        if self._live:
            self._try("err", self._live.stop)

    def _print_out(self, text: str) -> None:
        """To stdout, which may be a file; on one terminal with the live line, above that line."""
        if self._live and sys.stdout.isatty():
            self._print_err(text)
        else:
            self._try("out", lambda: _write(sys.stdout, text))

    def _print_err(self, text: str) -> None:
        if self._live:
            self._try("err", lambda: self._console.print(Text.from_ansi(text), soft_wrap=True))
        else:
            self._try("err", lambda: _write(self._console.file, text))  # byte for byte: a log may hold tabs and colours

    def _try(self, stream: str, show: Callable[[], object]) -> None:
        """Show something there; where nobody listens any more (`| head`, a full disk), never again."""
        if stream in self._deaf:
            return
        try:
            show()
        except (OSError, ValueError, SystemExit):  # rich ends the process when a pipe is closed
            self._deaf.add(stream)


def _write(file: IO[str], text: str) -> None:
    file.write(text + "\n")
    file.flush()
