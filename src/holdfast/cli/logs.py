"""`holdfast logs`: show what the workers of a run printed, in all attempts, also while the run trains."""

import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import say
from holdfast.errors import BadInput
from holdfast.printable import printable

if TYPE_CHECKING:
    from holdfast.runs.logs import WorkerLog

REFRESH = 0.5


def logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    rank: Annotated[
        int | None, typer.Option(help="Show only workers that had this rank at some time.", show_default="all ranks")
    ] = None,
    attempt: Annotated[int | None, typer.Option(help="Number of the attempt.", show_default="all attempts")] = None,
    err: Annotated[bool, typer.Option("--err", help="Show only stderr, which has warnings and tracebacks.")] = False,
    tail: Annotated[
        int | None, typer.Option(help="Show only this many lines at the end of each log.", show_default="all")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until the run ends.")] = False,
) -> None:
    """Show what the workers of a RUN printed. Example: holdfast logs runs/a --rank 1 --tail 20 --follow"""
    from holdfast.runs.logs import find_logs
    from holdfast.runs.status import is_training

    if tail is not None and tail < 0:
        raise BadInput(f"--tail {tail} is not a number of lines: give 0 or more.")
    printer = _Printer(tail)
    printer.show(find_logs(run, attempt, rank, only_err=err))
    try:
        while follow and is_training(run):
            time.sleep(REFRESH)
            printer.show(find_logs(run, attempt, rank, only_err=err))
    except KeyboardInterrupt:
        return
    if not printer.has_shown:
        who = "the workers" if rank is None else f"rank {rank}"
        where = "" if attempt is None else f" of attempt {attempt}"
        say(f"{who}{where} printed nothing{' to stderr' if err else ''}")


class _Printer:
    """A printer of new log lines; a title above each block of lines says which worker printed them."""

    def __init__(self, tail: int | None) -> None:
        self._tail = tail  # of the logs that exist at first
        self._read: dict[Path, int] = {}  # by log: the bytes that were shown
        self._last: Path | None = None
        self.has_shown = False

    def show(self, logs: "Iterable[WorkerLog]") -> None:
        for log in logs:
            lines = log.lines(self._read.get(log.path, 0))
            if self._tail == 0:
                self._read[log.path] = log.path.stat().st_size
                continue
            for line, end in lines if self._tail is None else deque(lines, self._tail):
                if log.path != self._last:
                    say(f"== {log.title}: {log.path}")
                sys.stdout.write(printable(line) + "\n")
                self._read[log.path] = end
                self._last, self.has_shown = log.path, True
        sys.stdout.flush()
        self._tail = None
