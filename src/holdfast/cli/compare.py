"""`holdfast compare`: the saved states of two runs, compared bit by bit."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.console import cell, complain, say

if TYPE_CHECKING:
    from holdfast.compare.saved_run import SavedRun

PLACE = "The folder of a run, or a checkpoint store."


def compare(
    one: Annotated[str, typer.Argument(metavar="RUN", help=PLACE)],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The run, or the store, to compare it with.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step of the snapshots to compare.  [default: the newest verified one of each run]"),
    ] = None,
) -> None:
    """Compare the saved states of two runs bit by bit, and name the tensors that differ. The exit status is 1 if the states
    differ. Example: holdfast compare runs/undisturbed runs/killed"""
    from holdfast.compare import report, state_differences
    from holdfast.compare.saved_run import differing_settings, open_run

    runs = open_run(one, step), open_run(other, step)
    for run in runs:
        _print_run(run)
    if runs[0].step != runs[1].step:
        say(f"different: the snapshots are of steps {runs[0].step} and {runs[1].step}")
        _print_common_step(*runs)
        raise typer.Exit(1)
    of_all_ranks = runs[0].shares == runs[1].shares
    found = state_differences.compare(*(run.state(of_all_ranks=of_all_ranks) for run in runs))
    say(report.verdict(found))
    if table := report.rows(found):
        _print_table(report.HEADS, table)
    for line in report.lines(found, one, other):
        say(line)
    if not of_all_ranks and any(run.has_values_of_ranks for run in runs):
        say(
            "note: the runs have other ranks: of the values that each rank has for itself, only those of rank 0 were compared"
        )
    if settings := differing_settings(*runs):
        say(report.settings_line(settings))
    raise typer.Exit(0 if found.is_equal else 1)


def _print_run(run: "SavedRun") -> None:
    from holdfast.finding import counted

    for bad in run.passed_over:
        say(f"{run.place}: passed over {bad.name}: {bad.why}")
    if run.missing:
        complain(
            f"the snapshot of step {run.missing} of {run.place} was committed but is gone: this is the newest one left, of "
            f"step {run.step}."
        )
    say(f"{run.place}: step {run.step}, {counted(run.world_size, 'rank')}")


def _print_common_step(one: "SavedRun", other: "SavedRun") -> None:
    """Print the command that compares the newest step of which both runs have a snapshot."""
    if common := {step for step in set(one.steps) & set(other.steps) if step <= min(one.step, other.step)}:
        command = shlex.join(["holdfast", "compare", one.place, other.place, "--step", str(max(common))])
        say(f"next: {command}")
    else:
        say(f"no step has a snapshot in both: {one.place} has {one.steps}, {other.place} has {other.steps}")


def _print_table(heads: tuple[str, ...], rows: list[tuple[str, str, str, str]]) -> None:
    table = Table(Column(heads[0], overflow="fold"), *heads[1:], box=None)
    for row in rows:
        table.add_row(*map(cell, row))
    Console().print(table)
