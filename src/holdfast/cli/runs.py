"""`holdfast runs` and `holdfast logs`: which runs there are, what their workers printed, and how to be rid of them."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from holdfast.cli.console import LOOK, cell, complain, safe, say, size
from holdfast.errors import BadInput, HoldfastError

if TYPE_CHECKING:
    from holdfast.runs.status import RunStatus

DAY = 86400.0
Where = Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look for runs.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


class _ListsByDefault(TyperGroup):
    """`runs DIR` is `runs list DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


runs = typer.Typer(cls=_ListsByDefault, help="List runs; remove them (rm, prune). Example: holdfast runs")
logs = typer.Typer()


@runs.command("list")
def runs_list(where: Where = Path("runs")) -> None:
    """List the runs in a folder: state, step, goodput and size. Example: holdfast runs"""
    found = _standing(where)
    table = Table(Column("run", overflow="fold"), "state", "step", "goodput", "size", "last written", box=None)
    for each in found:
        table.add_row(*map(cell, _row(each)))
    Console().print(table)


@runs.command("rm")
def runs_rm(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")], yes: Yes = False
) -> None:
    """Remove runs with all they saved; never one that is being trained. Example: holdfast runs rm runs/old"""
    from holdfast.runs.removal import check_removable
    from holdfast.runs.status import standing

    for path in paths:
        check_removable(path)
    gone = _remove([standing(path) for path in paths], yes=yes)
    _say_removed(gone, len(paths))
    raise typer.Exit(0 if len(gone) == len(paths) else 2)


@runs.command("prune")
def runs_prune(
    where: Where = Path("runs"),
    older_than: Annotated[
        float | None, typer.Option(help="Also those of which nothing was written for so many days.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Remove the runs in a folder in which nothing was trained. Example: holdfast runs prune --older-than 30"""
    cut = time.time() - DAY * older_than if older_than is not None else 0.0
    found = [each for each in _standing(where) if not each.trains]
    doomed = [each for each in found if not each.has_trained or each.last < cut]
    if not doomed:
        say("there is nothing to prune")
        return
    removable = [each for each in doomed if _may_go(each)]
    gone = _remove(removable, yes=yes) if removable else []
    _say_removed(gone, len(doomed))
    raise typer.Exit(0 if len(gone) == len(doomed) else 1)


@logs.command("logs", rich_help_panel=LOOK)
def show_logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    rank: Annotated[int | None, typer.Option(help="Of all that were this rank.  [default: all ranks]")] = None,
    attempt: Annotated[int | None, typer.Option(help="Of one attempt.  [default: the last]")] = None,
) -> None:
    """Show what the workers of a RUN printed. Example: holdfast logs runs/a --rank 1 --attempt 2"""
    from holdfast.runs.logs import logs

    number, found = logs(run, attempt, rank)
    shown = 0
    for log in found:
        later = f", later rank {', '.join(map(str, log.later))}" if log.later else ""
        title = f"== {log.who}{later}, attempt {number}, {'stdout' if log.stream == 'out' else 'stderr'}: {log.path}"
        for line in log.lines():
            if title:
                say(title)
                title, shown = "", shown + 1
            sys.stdout.write(safe(line) + "\n")
    if not shown:
        say(f"{'the workers' if rank is None else f'rank {rank}'} of attempt {number} printed nothing")


def _standing(where: Path) -> list["RunStatus"]:
    from holdfast.runs.status import runs_in, standing

    if not where.is_dir():
        raise BadInput(f"there is no folder {where} to look for runs in: name the one that holds yours.")
    found = [standing(path) for path in runs_in(where)]
    if not found:
        raise BadInput(f"there are no runs in {where}: name the folder that holds yours.")
    return found


def _may_go(each: "RunStatus") -> bool:
    """Whether a run can be removed; if not, say why."""
    from holdfast.runs.removal import check_removable

    try:
        check_removable(each.folder)
    except HoldfastError as error:
        complain(str(error))
        return False
    return True


def _row(each: "RunStatus") -> tuple[str, ...]:
    rate = "" if each.goodput is None else f"{each.goodput:.2f} steps/s"
    return str(each.folder), each.state, str(each.step), rate, size(each.size), _ago(time.time() - each.last)


def _ago(seconds: float) -> str:
    for unit, name in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} seconds ago"


def _remove(doomed: Sequence["RunStatus"], *, yes: bool) -> list["RunStatus"]:
    """Say what is to go, ask, and remove it; those that are gone then. Of one that cannot be removed, it says why."""
    from holdfast.runs.removal import elsewhere, remove

    for each in doomed:
        say(f"{each.folder}: {each.state}, step {each.step}, {size(each.size)}")
        if place := elsewhere(each.folder):
            say(f"  its snapshots are at {place} and stay there")
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("nobody is here to be asked: give --yes to remove them.")
        typer.confirm(f"Remove {'it' if len(doomed) == 1 else f'these {len(doomed)} runs'} for good?", abort=True)
    gone = []
    for each in doomed:
        try:
            remove(each.folder)
            gone.append(each)
        except HoldfastError as error:
            complain(str(error))
    return gone


def _say_removed(gone: Sequence["RunStatus"], of: int) -> None:
    say(f"removed {len(gone)} of {of}, {size(sum(each.size for each in gone))}")
