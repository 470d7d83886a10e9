"""Output that all commands share: one-line errors on stderr, plain text on stdout, and progress bars."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
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

LINE_EVERY = 15.0  # seconds between two lines of progress, if stderr is not a terminal

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
    """Yield a function that adds a progress bar on stderr, or if stderr is not a terminal, prints a line now and then."""
    with progress_bars() as bars:

        def begin(what: str, total: int) -> "Progress":
            if bars.disable:
                return progress_lines(what, total)
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        yield begin


def progress_lines(what: str, total: int, clock: Callable[[], float] = time.monotonic) -> "Progress":
    """Return a function that counts up to `total` and prints the count, the rate and the remaining time on stderr.

    It prints one line in `LINE_EVERY` seconds, and none before."""
    begin = printed = clock()
    count = 0

    def advance(done: int) -> None:
        nonlocal count, printed
        count, now = count + done, clock()
        if now >= printed + LINE_EVERY:
            printed, rate = now, count / (now - begin)
            left = f"{(total - count) / rate:.0f} s left" if rate else "nothing done yet"
            typer.echo(f"{what}: {count:,} of {total:,}, {rate:.3g} a second, {left}", err=True)

    return advance


def progress_bars() -> "Bars":
    """Return progress bars on stderr, with the count and the remaining time; they are hidden without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Bars(*columns, console=console, disable=not console.is_terminal)
