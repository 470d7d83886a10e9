"""What all commands print alike: progress on stderr, sizes, and one line when something is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import filesize
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from holdfast.lab.experiment import Meter, Progress


def complain(line: str, code: int = 2) -> int:
    """Say what is wrong in one line on stderr; returns the exit status."""
    text = f"holdfast: {safe(' '.join(line.split()))}"
    Console(stderr=True).print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
    return code


def say(text: str) -> None:
    """Lines on stdout as they are: nothing in them is markup, and a terminal folds them, not we."""
    lines = "\n".join(map(safe, text.split("\n")))
    Console().print(lines, markup=False, emoji=False, highlight=False, soft_wrap=True)


def safe(text: str) -> str:
    """Text for a terminal: what does not print, such as an escape sequence out of a stranger's file, is spelled out."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def cell(text: object) -> Text:
    """What a table shows as it is: neither markup nor anything else but text."""
    return Text(safe(str(text)))


def size(count: int) -> str:
    """A number of bytes for people."""
    return str(filesize.decimal(count))


@contextmanager
def meter() -> "Iterator[Meter]":
    """Live progress bars on stderr; nothing where stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def begin(what: str, total: int) -> "Progress":
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        yield begin
