"""`holdfast lab`: the experiments."""

import os
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.console import meter, say
from holdfast.errors import BadInput
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.lab.result import Result

lab = typer.Typer(help="Experiments: claims of the papers and our own, measured.", no_args_is_help=True)


@lab.command("list")
def lab_list() -> None:
    """List the experiments. Example: holdfast lab list"""
    require("lab", "`holdfast lab`")
    from holdfast.lab.registry import EXPERIMENTS

    table = Table("name", "what it measures", "figure", box=None)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.title, experiment.source)
    Console().print(table)


@lab.command("run")
def lab_run(
    name: Annotated[str, typer.Argument(help="An experiment from `holdfast lab list`.")],
    out: Annotated[Path | None, typer.Option(help="Folder for result and report.  [default: results/NAME]")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with data sets; else $HOLDFAST_DATA, else fetched.")] = None,
    trials: Annotated[int | None, typer.Option(help="Trials of each kind.  [default: the experiment's own]")] = None,
    seed: Annotated[int, typer.Option(help="Everything random comes from it.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Processes.  [default: one for each core]")] = None,
    panel: Annotated[
        list[str] | None, typer.Option(help="Only this panel; may be given again.  [default: all]")
    ] = None,
    interval: Annotated[int, typer.Option(help="Iterations between two full checkpoints.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="Small and within a minute, on embedded data.")] = False,
) -> None:
    """Run an experiment, print its claims, write its report. Example: holdfast lab run qp-bound --quick"""
    require("lab", "`holdfast lab`")
    from holdfast.lab.experiment import Options
    from holdfast.lab.registry import experiment
    from holdfast.lab.result import command_line, prepare
    from holdfast.report import results

    chosen = experiment(name)
    if panel and not chosen.panels:
        raise BadInput(f"{name} has no panels: leave out --panel")
    options = Options(
        seed=seed,
        trials=trials,
        jobs=os.cpu_count() or 1 if jobs is None else jobs,
        quick=quick,
        data=data,
        out=out or Path("results") / name,
        panels=tuple(panel or ()),
        interval=interval,
    )
    folder = prepare(options.out)
    with meter() as begin:
        result = chosen.run(options, begin)
    result = replace(result, command=command_line(sys.argv[1:]), date=date.today().isoformat())
    _print_claims(result)
    say(f"report: {results.write(result, folder)}")
    raise typer.Exit(0 if result.holds else 1)


def _print_claims(result: "Result") -> None:
    from holdfast.report.results import expected, measured, verdict

    table = Table(result.experiment, "claim", "expected", "measured", title_justify="left")
    for claim in result.claims:
        style = "yellow" if not claim.resolved else "green" if claim.holds else "bold red"
        table.add_row(f"[{style}]{verdict(claim)}[/]", claim.claim, expected(claim), measured(claim))
    Console().print(table)
    for remark in result.remarks:
        Console().print(f"  {remark}", highlight=False)
