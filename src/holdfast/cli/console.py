"""Output that all commands share: one-line errors on stderr, plain text on stdout, and progress bars."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import filesize
from rich.console import Console
from rich.text import Text

from holdfast.printable import printable

if TYPE_CHECKING:
    from holdfast.lab.experiment import Meter, Progress


def missing_separator_hint(argv: Sequence[str], option: str | None) -> str:
    """Return a hint to put `--` before `option` if it follows a script in `argv` without `--`, otherwise ""."""
    index = next((i for i, word in enumerate(argv) if option and word.partition("=")[0] == option), None)
    if index is None or argv[:1] != ["run"] or not any(word.endswith(".py") for word in argv[1:index]):
        return ""
    command = shlex.join(["holdfast", *argv[:index], "--", *argv[index:]])
    return f"Put the script's own arguments after --: {command}"


def complain(line: str, code: int = 2) -> int:
    """Print the error message `line` on stderr, and return `code`, the exit status of the command."""
    text = f"holdfast: {printable(' '.join(line.split()))}"
    Console(stderr=True).print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
    return code


def say(text: str) -> None:
    """Print `text` on stdout without markup and without wrapping."""
    lines = "\n".join(map(printable, text.split("\n")))
    Console().print(lines, markup=False, emoji=False, highlight=False, soft_wrap=True)


def cell(text: object) -> Text:
    return Text(printable(str(text)))


def size(count: int) -> str:
    return str(filesize.decimal(count))


@contextmanager
def meter() -> "Iterator[Meter]":
    """Yield a function that adds a progress bar on stderr; nothing is shown if stderr is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def begin(what: str, total: int) -> "Progress":
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        yield begin
