"""`holdfast cost`: the wall-clock time of a run divided by cause, or several runs compared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.console import cell, say, size
from holdfast.errors import BadInput
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.cost.breakdown import CostBreakdown

SHOWN = 10  # saves; a run may have thousands


def cost(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several runs are compared.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    figure: Annotated[
        Path | None,
        typer.Option(help="Write a figure to this file: .png, .pdf or .svg. Not for runs on the parameter server."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="For a RUN on the parameter server: a run without failures, whose convergence is compared with that of RUN."
        ),
    ] = None,
) -> None:
    """Show how the wall-clock time of a run was spent. Example: holdfast cost runs/blocking runs/overlapped --figure cost.png"""
    if figure:
        require("lab", "--figure")
    from holdfast.cli.serve_cost import print_served
    from holdfast.cost import compare
    from holdfast.cost.breakdown import cost_of
    from holdfast.cost.run_events import read_events
    from holdfast.history.log import read_history
    from holdfast.runs.histories import open_history
    from holdfast.server.cost import is_served

    runs, served = {}, {}
    for path in paths:
        with open_history(path) as history:
            run = read_events(history.files)
            served[str(path)] = run.events if is_served(run.events) else []
            if not served[str(path)]:
                runs[str(path)] = cost_of(run)
    if len(runs) < len(served):
        if figure:
            raise BadInput(
                "--figure cannot draw a run of a parameter server: leave it out, or write a page with figures: "
                "holdfast report RUN... --out compared.html"
            )
        print_served(served, read_history(reference).events if reference else None, as_json=as_json)
        return
    if reference:
        raise BadInput("--reference needs a run of `holdfast serve`, and RUN is a training run: leave it out.")
    if as_json:
        say(json.dumps({name: breakdown.to_json() for name, breakdown in runs.items()}, indent=1))
    elif len(runs) == 1:
        _print_one(next(iter(runs.values())))
    else:
        print_compared(compare.compare(runs))
    if figure:
        try:
            compare.figure(runs).savefig(figure)
        except (OSError, ValueError) as error:
            raise BadInput(f"cannot write the figure {figure}: {error}.") from error


def print_compared(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(Column("run", overflow="fold"), box=None)
    heads = "steps/s", "wall", "stall\n/save", "stall", "trains\nafter", "steps\nredone", "restarts", "samples\nlost"
    for name in heads:
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


def _print_one(breakdown: "CostBreakdown") -> None:
    from holdfast.finding import counted

    if not breakdown.trained:
        attempts = counted(len(breakdown.attempts), "attempt")
        say(f"no step was trained yet, in {attempts} and {breakdown.wall:.1f} s")
        return
    say(
        f"goodput: {breakdown.goodput:.2f} committed steps per second ({breakdown.committed} in {breakdown.wall:.1f} s)"
    )
    lost = f"; samples lost: {breakdown.samples_lost}" if breakdown.samples_lost else ""
    say(
        f"restarts: {breakdown.restarts}; rework: {breakdown.rolled_back} steps, {breakdown.seconds['rework']:.2f} s{lost}"
    )
    table = Table("wall clock by cause", "seconds", "share", box=None)
    for cause, seconds in breakdown.seconds.items():
        table.add_row(cause, f"{seconds:.3f}", f"{breakdown.share[cause]:.1%}")
    Console().print(table)
    if breakdown.failures:
        heads = "failure", "step", "rank", "detected", "after", "trains after", "steps lost", "samples lost"
        table = Table(*heads, box=None)
        for failure in breakdown.failures:
            table.add_row(
                cell(failure.name),
                str(failure.step),
                "" if failure.rank is None else str(failure.rank),
                cell(failure.detected or ""),
                _seconds(failure.detection),
                _seconds(failure.to_first_step),
                str(failure.rework_steps),
                str(failure.samples_lost),
            )
        Console().print(table)
    if breakdown.stragglers:
        table = Table("slow", "from step", "to step", "times as slow", "others waited", box=None)
        for slow in breakdown.stragglers:
            table.add_row(slow.name, str(slow.step), str(slow.until), f"{slow.ratio:.1f}", _seconds(slow.seconds))
        Console().print(table)
    if restarts := [failure for failure in breakdown.failures if failure.parts]:
        table = Table("restart after step", *restarts[0].parts, box=None)
        for failure in restarts:
            table.add_row(str(failure.step), *map(_seconds, failure.parts.values()))
        Console().print(table)
    if breakdown.listed_saves:
        Console().print(_saves(breakdown))


def _saves(breakdown: "CostBreakdown") -> Table:
    from holdfast.cost.attempts import SaveCost

    parts = ("waited", "snapshot", "enqueue", "backpressure", "write", "sync", "overlapped")
    heads = ("step", "size", *(part.replace("backpressure", "pressure") for part in parts), "durable")
    table = Table(*heads, box=None, padding=(0, 1, 0, 0), title="Saves, in milliseconds")
    saves = breakdown.listed_saves
    for save in saves[-SHOWN:]:
        times: list[str] = []
        if isinstance(save, SaveCost):
            durable = "" if save.durable_after is None else f"{1000 * save.durable_after:.0f}"
            times = [*(f"{1000 * getattr(save.stall, part):.1f}" for part in parts), durable]
        table.add_row(str(save.step), size(save.bytes), *times)
    if len(saves) > SHOWN:
        table.caption = f"the last {SHOWN} of {len(saves)} saves; --json has all"
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
