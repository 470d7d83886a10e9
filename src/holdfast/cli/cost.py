"""`holdfast cost`: what a run spent its time on, and several runs side by side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.console import LOOK, cell, say, size
from holdfast.errors import BadInput
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.cost.breakdown import Spent

cost = typer.Typer()
SHOWN = 10  # saves; a run may have thousands


@cost.command("cost", rich_help_panel=LOOK)
def cost_of(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Write a figure here: .png, .pdf or .svg.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A served run without failures: how many iterations later did RUN converge?")
    ] = None,
) -> None:
    """Show what a run spent its time on. Example: holdfast cost runs/blocking runs/overlapped --figure cost.png"""
    if figure:
        require("lab", "--figure")
    from holdfast.cli.serve_cost import print_served
    from holdfast.cost import compare
    from holdfast.cost.breakdown import spent
    from holdfast.history.log import read_history
    from holdfast.runs.histories import histories
    from holdfast.server.cost import is_served

    told = {}
    for path in paths:
        with histories([path]) as files:
            told[str(path)] = read_history(files).events
    if any(map(is_served, told.values())):
        if figure:
            raise BadInput("there is no figure of a served run: leave out --figure.")
        print_served(told, read_history(reference).events if reference else None, as_json=as_json)
        return
    if reference:
        raise BadInput("--reference is for runs of `holdfast serve`, and this is none.")
    runs = {name: spent(events) for name, events in told.items()}
    if as_json:
        say(json.dumps({name: each.to_json() for name, each in runs.items()}, indent=1))
    elif len(runs) == 1:
        _print_one(next(iter(runs.values())))
    else:
        print_compared(compare.compare(runs))
    if figure:
        try:
            compare.figure(runs).savefig(figure)
        except (OSError, ValueError) as error:
            raise BadInput(f"cannot write the figure {figure}: {error}") from error


def print_compared(rows: Sequence[dict[str, Any]]) -> None:
    """Runs side by side."""
    table = Table(Column("run", overflow="fold"), box=None)
    for name in (
        "steps/s",
        "wall",
        "stall\n/save",
        "stall",
        "trains\nafter",
        "steps\nredone",
        "restarts",
        "samples\nlost",
    ):
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(
            cell(row["run"]),
            f"{row['goodput']:.1f}",
            f"{row['wall']:.1f} s",
            f"{1000 * row['stall_per_save']:.1f} ms",
            f"{row['stall'] / (row['wall'] or 1.0):.1%}",
            _seconds(row["trains_after"]),
            str(row["rework_steps"]),
            str(row["restarts"]),
            str(row["samples_lost"]),
        )
    Console().print(table)


def _print_one(found: "Spent") -> None:
    from holdfast.cost.compare import by_cause
    from holdfast.finding import counted

    if not found.trained:
        attempts = counted(len(found.attempts), "attempt")
        say(f"nothing was trained yet: no step in {attempts}, which took {found.wall:.1f} s")
        return
    say(f"goodput: {found.goodput:.2f} committed steps per second ({found.committed} in {found.wall:.1f} s)")
    lost = f"; samples lost: {found.samples_lost}" if found.samples_lost else ""
    say(f"restarts: {found.restarts}; rework: {found.rolled_back} steps, {found.seconds['rework']:.2f} s{lost}")
    Console().print(_causes(by_cause(found)))
    if found.failures:
        Console().print(_failed(found))
    if found.saves:
        Console().print(_saves(found))


def _causes(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("wall clock by cause", "seconds", "share", box=None)
    for row in rows:
        table.add_row(row["cause"], f"{row['seconds']:.3f}", f"{row['share']:.1%}")
    return table


def _failed(found: "Spent") -> Table:
    table = Table(
        "failure", "step", "rank", "detected", "after", "trains after", "steps lost", "samples lost", box=None
    )
    for each in found.failures:
        table.add_row(
            cell(each.kind or "not injected"),
            str(each.step),
            "" if each.rank is None else str(each.rank),
            cell(each.detected or ""),
            _seconds(each.detection),
            _seconds(each.to_first_step),
            str(each.rework_steps),
            str(each.samples_lost),
        )
    return table


def _saves(found: "Spent") -> Table:
    parts = ("waited", "snapshot", "enqueue", "backpressure", "write", "sync", "overlapped")
    heads = ("step", "size", *(part.replace("backpressure", "pressure") for part in parts), "durable")
    table = Table(
        *heads,
        box=None,
        padding=(0, 1, 0, 0),
        title="Saves, in milliseconds: what training waited for, and what it did not",
    )
    for save in found.saves[-SHOWN:]:
        durable = "" if save.durable_after is None else f"{1000 * save.durable_after:.0f}"
        stall = (f"{1000 * getattr(save.stall, part):.1f}" for part in parts)
        table.add_row(str(save.step), size(save.bytes), *stall, durable)
    if len(found.saves) > SHOWN:
        table.caption = f"the last {SHOWN} of {len(found.saves)} saves; --json has all"
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
