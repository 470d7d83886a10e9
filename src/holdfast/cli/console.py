"""Output that all commands share: one-line errors on stderr, plain text on stdout, and progress bars."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich import filesize
from rich.console import Console
from rich.text import Text

from holdfast.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from holdfast.lab.experiment import Meter, Progress

Script = Annotated[
    str, typer.Argument(help="A Python script that calls holdfast.attach(), or with -m a module that does.")
]
Module = Annotated[
    bool,
    typer.Option("-m", "--module", help="SCRIPT is the name of a module, such as package.train, as in python -m."),
]


def missing_separator_hint(argv: Sequence[str], option: str | None) -> str:
    """Return advice to put `--` before `option` in the command line `argv`, or "" if the advice does not apply.

    It applies if `option` follows the name of the user's script, and so seems to be an argument of the script."""
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
    with progress_bars() as bars:

        def begin(what: str, total: int) -> "Progress":
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        yield begin


def progress_bars() -> "Bars":
    """Return progress bars on stderr, with the count and the remaining time; they are hidden without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Bars(*columns, console=console, disable=not console.is_terminal)
