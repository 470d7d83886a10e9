"""What all commands print alike: progress on stderr, sizes, and one line when something is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from holdfast.lab.experiment import Meter, Progress


def complain(line: str, code: int = 2) -> int:
    """Say what is wrong in one line on stderr; returns the exit status."""
    Console(stderr=True).print(f"holdfast: {' '.join(line.split())}", markup=False, highlight=False, soft_wrap=True)
    return code


def say(line: str) -> None:
    """One line on stdout as it is: nothing in it is markup, and a terminal folds it, not we."""
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def size(count: int) -> str:
    """A number of bytes for people."""
    return str(filesize.decimal(count))


@contextmanager
def meter() -> Iterator[Meter]:
    """Live progress bars on stderr; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def begin(what: str, total: int) -> Progress:
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        yield begin
