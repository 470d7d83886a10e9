"""What all commands print alike: progress on stderr, sizes, and one line when something is wrong.

What a person wants, as `holdfast --help` groups the commands.

What to say beside a usage error, where the likely mistake is known. Pure.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

TRAIN, LOOK, PROVE, STORE, LAB = ORDER = ("Train", "Look", "Prove", "Store", "Lab")


class ByWhatIsWanted(TyperGroup):
    """Commands in the order of their panels; those of one panel as they were added."""

    def list_commands(self, ctx: Any) -> list[str]:
        panels = {name: getattr(command, "rich_help_panel", None) for name, command in self.commands.items()}
        place = {panel: number for number, panel in enumerate(ORDER)}
        return sorted(super().list_commands(ctx), key=lambda name: place.get(str(panels[name]), len(ORDER)))


def forgotten_dashes(argv: Sequence[str], option: str | None) -> str:
    """How the command was meant, if an option that we do not know stands behind a script: it is the script's own."""
    given = next((i for i, each in enumerate(argv) if option and each.partition("=")[0] == option), None)
    if given is None or argv[:1] != ["run"] or not any(each.endswith(".py") for each in argv[1:given]):
        return ""
    meant = shlex.join(["holdfast", *argv[:given], "--", *argv[given:]])
    return f"What the script is given comes after --: {meant}"


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
