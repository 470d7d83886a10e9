"""`holdfast runs`: list and remove runs."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from holdfast.cli.console import cell, complain, say, size
from holdfast.errors import BadInput, HoldfastError

if TYPE_CHECKING:
    from holdfast.runs.status import RunStatus

DAY = 86400.0
Where = Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look for runs.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


class _ListsByDefault(TyperGroup):
    """A command group that reads `runs DIR` as `runs list DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)


runs = typer.Typer(cls=_ListsByDefault, help="List runs; remove them (rm, prune). Example: holdfast runs")


@runs.command("list")
def runs_list(where: Where = Path("runs")) -> None:
    """List the runs in a folder: state, step, goodput and size. Example: holdfast runs"""
    table = Table(Column("run", overflow="fold"), "state", "step", "goodput", "size", "last written", box=None)
    for run in _statuses(where):
        rate = "" if run.goodput is None else f"{run.goodput:.2f} steps/s"
        row = run.folder, run.state, run.step, rate, size(run.size), _ago(time.time() - run.last)
        table.add_row(*map(cell, row))
    Console().print(table)


@runs.command("rm")
def runs_rm(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")], yes: Yes = False
) -> None:
    """Remove runs with their histories, logs and snapshots. A run that still trains is refused. Example: holdfast runs rm runs/old"""
    from holdfast.runs.status import check_removable, run_status

    for path in paths:
        check_removable(path)
    removed = _remove([run_status(path) for path in paths], yes=yes)
    say(f"removed {len(removed)} of {len(paths)}, {size(sum(run.size for run in removed))}")
    raise typer.Exit(0 if len(removed) == len(paths) else 2)


@runs.command("prune")
def runs_prune(
    where: Where = Path("runs"),
    older_than: Annotated[
        float | None, typer.Option(help="Also remove runs to which nothing was written for this many days.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Remove runs that trained nothing. Example: holdfast runs prune --older-than 30"""
    from holdfast.runs.status import check_removable

    cut = time.time() - DAY * older_than if older_than is not None else 0.0
    idle = [run for run in _statuses(where) if not run.is_training]
    unwanted = [run for run in idle if not run.has_trained or run.last < cut]
    if not unwanted:
        say("there is nothing to prune")
        return
    removable = []
    for run in unwanted:
        try:
            check_removable(run.folder)
            removable.append(run)
        except HoldfastError as error:
            complain(str(error))
    removed = _remove(removable, yes=yes) if removable else []
    say(f"removed {len(removed)} of {len(unwanted)}, {size(sum(run.size for run in removed))}")
    raise typer.Exit(0 if len(removed) == len(unwanted) else 1)


def _statuses(where: Path) -> list["RunStatus"]:
    from holdfast.runs.status import run_status, runs_in

    if not where.is_dir():
        raise BadInput(f"there is no folder {where}: name the folder that holds your runs.")
    runs = [run_status(path) for path in runs_in(where)]
    if not runs:
        raise BadInput(f"there are no runs in {where}: name the folder that holds yours.")
    return runs


def _ago(seconds: float) -> str:
    for unit, name in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{max(0.0, seconds):.0f} seconds ago"


def _remove(runs: Sequence["RunStatus"], *, yes: bool) -> list["RunStatus"]:
    from holdfast.runs.status import remove, snapshots_elsewhere

    for run in runs:
        say(f"{run.folder}: {run.state}, step {run.step}, {size(run.size)}")
        if place := snapshots_elsewhere(run.folder):
            say(f"  its snapshots are at {place} and stay there")
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("there is no terminal to ask for confirmation: give --yes to remove them.")
        typer.confirm(f"Remove {'it' if len(runs) == 1 else f'these {len(runs)} runs'} for good?", abort=True)
    removed = []
    for run in runs:
        try:
            remove(run.folder)
            removed.append(run)
        except HoldfastError as error:
            complain(str(error))
    return removed
