"""The output of `holdfast run` (status line, supervisor's messages, workers' output), and the supervisor's journal.

Each worker prints to files of its own, and the supervisor shows the lines that are added to them. The journal is the
supervisor's own history of the run, which the audit reads. If a disk or the output fails, training continues with less
output.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from holdfast.errors import StorageFailed
from holdfast.events import Detect, Launch, Recover, Restart, What
from holdfast.finding import counted
from holdfast.history.follow import GrowingFile
from holdfast.history.lineage import Lineage
from holdfast.history.log import HistoryWriter, recall
from holdfast.runs.arguments import changes
from holdfast.runs.config import RunConfig
from holdfast.supervise.failure_cause import FirstFailure
from holdfast.supervise.restart_policy import RestartPolicy

Show = Callable[[str], None]
LONGEST = 1 << 16  # bytes kept of a line that is written over again and again


class Tail:
    """A reader of a growing text file that passes new lines to `show`."""

    def __init__(self, path: Path, show: Show) -> None:
        self.path, self._show = path, show
        self._file: BufferedReader | None = None
        self._rest = b""

    @property
    def bar(self) -> str:
        """The progress bar (a line redrawn with carriage returns) at the end of the file; empty if there is none."""
        _, over, now = self._rest.rstrip(b"\r").rpartition(b"\r")
        return now.decode(errors="replace") if over else ""

    def copy(self, *, last: bool = False) -> None:
        """Show the complete lines added since the last call. If `last`, also show an unfinished line, and close the file."""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:  # not there yet, or the worker has no log
                return
        text = self._rest
        with suppress(OSError):  # a disk that cannot be read does not end the run
            text += self._file.read()
        end = len(text) if last else text.rfind(b"\n") + 1
        self._rest = text[end:]
        if len(self._rest) > LONGEST and (over := self._rest.rfind(b"\r", 0, -1)) > 0:
            self._rest = self._rest[over:]
        if end:
            self._show(text[:end].decode(errors="replace").removesuffix("\n"))
        if last:
            self._file.close()


class WorkersOutput:
    """A reader of the output files of all workers. It passes new text of stdout to `out`, and of stderr to `err`."""

    def __init__(self, out: Show, err: Show) -> None:
        self._out, self._err = out, err
        self._tails: list[Tail] = []

    def bars(self) -> list[str]:
        return list(dict.fromkeys(bar for tail in self._tails if (bar := tail.bar.strip())))

    def add(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Start to follow more pairs of (stdout, stderr) files."""
        shown = {tail.path for tail in self._tails}
        new = [pair for pair in printed if not shown & {*pair}]
        self._tails += [tail for out, err in new for tail in (Tail(out, self._out), Tail(err, self._err))]

    def remove(self, printed: Sequence[tuple[Path, Path]]) -> None:
        """Show the rest of these pairs of (stdout, stderr) files, and stop following them."""
        paths = {path for pair in printed for path in pair}
        for tail in self._tails:
            if tail.path in paths:
                tail.copy(last=True)
        self._tails = [tail for tail in self._tails if tail.path not in paths]

    def copy(self, *, last: bool = False) -> None:
        for tail in self._tails:
            tail.copy(last=last)
        if last:
            self._tails = []


REFRESH = 0.25
PLAIN_REFRESH = 10.0
MOST_BARS = 4  # progress bars, of the first ranks that draw one


@dataclass(slots=True)
class StatusTotals:
    """The numbers in the supervisor's status line, computed from the events of the run."""

    began: float
    restarts: RestartPolicy
    run: Lineage = field(default_factory=Lineage)
    knows_saves: bool = True  # the events are of rank 0, which alone records saves
    _first: int | None = None  # steps committed before

    def add(self, what: What) -> None:
        self.run.add(what)
        if isinstance(what, Recover) and self._first is None:
            self._first = what.restored or 0

    @property
    def committed(self) -> int:
        """The number of steps in the newest snapshot, which a restart would not repeat."""
        return max(self.run.committed, self.run.restored or 0)

    def line(self, now: float) -> str:
        """Return the text of the status line; `now` is the time in seconds since 1970."""
        committed = self.committed - (self._first or 0)  # by this command
        goodput = [f"goodput {committed / max(now - self.began, 1e-3):.1f} steps/s"] if committed > 0 else []
        plan = self.run.plan
        steps = plan.steps if plan and plan.batch else 0
        every = plan.save_every if plan else 0
        in_flight = max(0, self.run.reached // every - self.committed // every) if every > 0 else 0
        restarts = counted(self.run.restarts, "restart")
        reached = f"step {self.run.reached}" + (f" of {steps}" if steps else "")
        workers = counted(self.run.workers, "worker")
        if not self.knows_saves:
            return f"{reached} · {restarts} · {workers}"
        left = f"{restarts}, {self.restarts.left(self.committed)} left"
        saves = f"{counted(in_flight, 'save')} in flight", f"committed {self.committed}"
        return " · ".join([reached, *goodput, left, *saves, workers])


class Display:
    """The terminal output of a run: a status line, the output of the workers, and messages of the supervisor."""

    def __init__(self, console: Console, history: Path, supervisor: str, restarts: RestartPolicy) -> None:
        self._console, self._history = console, history
        self._supervisor, self._rank_0 = (GrowingFile(history / f"{who}.jsonl") for who in (supervisor, "rank-0"))
        self._tally = StatusTotals(time.time(), restarts)
        self._own = StatusTotals(time.time(), restarts, knows_saves=False)  # of the first rank of this node
        self._own_rank: int | None = None
        self._own_file: GrowingFile | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = time.monotonic()
        self._said: tuple[int, ...] = ()  # the progress in the last status line
        self._warned: set[str] = set()
        self._closed: set[str] = set()  # streams that cannot be written any more
        self.output = WorkersOutput(self._print_out, self._print_err)

    def say(self, line: str, style: str = "") -> None:
        line = f"holdfast: {' '.join(line.split())}"
        if self._live:
            self._try("err", lambda: self._console.print(Text(line, style=style), soft_wrap=True))
        else:
            self._print_err(line)

    def warn(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            self.say(line, style="yellow")

    def show(self, title: str, text: str) -> None:
        """Show a text of several lines, such as a traceback, under `title`."""
        self.say(title, style="bold red")
        self._print_err(text.rstrip("\n"))

    def show_status(self, line: str) -> None:
        """Replace the status line by `line` until the next refresh, if the output is a terminal."""
        if live := self._live:
            text = Text(f"holdfast: {line}", style="cyan", no_wrap=True, overflow="ellipsis")
            self._try("err", lambda: live.update(text, refresh=True))

    def follow(self, rank: int) -> None:
        """Show the progress of `rank`, the first one of this node, if the history of rank 0 is on another node."""
        if rank != self._own_rank:
            self._own_rank, self._own_file = rank, GrowingFile(self._history / f"rank-{rank}.jsonl") if rank else None

    def _read_progress(self) -> StatusTotals:
        """Read new events, and return the totals of rank 0, or of this node's first rank if rank 0 lags an attempt."""
        for event in self._supervisor.new():
            self._tally.add(event.what)
            self._own.add(event.what)
        for event in self._rank_0.new():
            self._tally.add(event.what)
        for event in self._own_file.new() if self._own_file else ():
            self._own.add(event.what)
        return self._own if self._own.run.attempt > self._tally.run.attempt else self._tally

    def refresh(self, *, now: bool = False) -> None:
        """Show new output of the workers; redraw the status line if it is due or if `now` is True."""
        self.output.copy()
        moment = time.monotonic()
        if not now and moment - self._shown < (REFRESH if self._live else PLAIN_REFRESH):
            return
        self._shown = moment
        totals = self._read_progress()
        line = totals.line(time.time())
        if live := self._live:
            # Cut at the width of the terminal: lines that wrap cannot be drawn over.
            bars = self.output.bars()[:MOST_BARS]
            cut = [Text.from_ansi(bar, no_wrap=True, overflow="ellipsis", end="") for bar in bars]
            self._try("err", lambda: live.update(Group(Text(line, style="cyan"), *cut), refresh=True))
            return
        progress = (totals.run.attempt, totals.run.reached, totals.committed)
        if totals.run.reached and not (now and progress == self._said):
            self._said = progress
            self.say(line)
        for bar in self.output.bars()[:1]:  # of the first rank: the others draw the same
            self._print_err(bar)

    def __enter__(self) -> "Display":
        if self._live:
            self._try("err", self._live.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.output.copy(last=True)
        if self._live:
            self._try("err", self._live.stop)

    def _print_out(self, text: str) -> None:
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
        if stream in self._closed:
            return
        try:
            show()
        except (OSError, ValueError, SystemExit):  # rich ends the process when a pipe is closed
            self._closed.add(stream)


def _write(file: IO[str], text: str) -> None:
    file.write(text + "\n")
    file.flush()


class Journal:
    def __init__(self, folder: Path, who: str, display: Display) -> None:
        self._history, self._display = HistoryWriter(folder, who), display
        self._shown: set[tuple[str, str]] = set()  # errors whose traceback was shown

    def append(self, what: What) -> None:
        """Write an event to the history file and sync it; show a warning if the disk refuses it."""
        self._history.append(what)
        try:
            self._history.flush()
            self._history.sync()
        except StorageFailed as error:
            self._display.warn(str(error))

    def launch(self, config: RunConfig, attempt: int, workers: int, nodes: int) -> None:
        """Record that workers were started, and which script arguments differ from the previous command."""
        argv = (config.script, *config.args)
        launches = [event.what for event in recall(self._history.path, "launch")]
        last = next((what.argv for what in reversed(launches) if isinstance(what, Launch)), argv)
        self.append(
            Launch(
                attempt=attempt,
                workers=workers,
                argv=argv,
                nodes=nodes,
                source=config.source.place if config.source else None,
                weights=config.weights,
                extends=config.extend,
                changed=tuple(change.name for change in changes(last[1:], argv[1:])),
            )
        )

    def detect(self, attempt: int, failure: FirstFailure) -> None:
        """Record and show a failure; the traceback of an error is shown only the first time."""
        worker = (attempt, failure.rank, failure.local_rank)
        self.append(Detect(*worker, failure.kind, failure.message, failure.exit, failure.signal, failure.step))
        self._display.output.copy()
        if failure.traceback and failure.kind == "error" and failure.error[:2] not in self._shown:
            self._shown.add(failure.error[:2])
            self._display.show(f"{failure.worker} raised, in attempt {attempt}:", failure.traceback)
        else:
            self._display.say(failure.line_with_pid, style="yellow")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._history.close()
        except StorageFailed as refused:  # the verdict stands
            self._display.warn(str(refused))


def last_attempt(history: Path) -> int:
    """Return the number of the last attempt (start of all workers) in the folder `history`; 0 if it has none.

    The last attempt may be in the history of another supervisor, if the run had another number of nodes before."""
    files = history.glob("supervisor*.jsonl")
    started = (event.what for file in files for event in recall(file, "launch", "restart"))
    return max((what.attempt for what in started if isinstance(what, Launch | Restart)), default=0)
