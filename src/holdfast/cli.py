"""The `holdfast` command: parse, call, print. Errors are one line; exit 1 is a failed verdict or claim, 2 bad input."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from holdfast.errors import BadInput, HoldfastError
from holdfast.lab.experiment import Meter, Options, Progress
from holdfast.lab.result import Result, Row

app = typer.Typer(
    name="holdfast",
    help="Training that survives failures, proves that it did, and measures what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="Experiments: claims of the papers and our own, measured.", no_args_is_help=True)
app.add_typer(lab, name="lab")

_UsageError: Any = typer.BadParameter.__mro__[
    1
]  # whichever library parses for typer, this is the base of its usage errors


def main() -> None:
    """Run the command; everything that goes wrong on purpose is one line on stderr."""
    try:
        code = app(standalone_mode=False)
    except HoldfastError as error:
        sys.exit(_complain(str(error)))
    except _UsageError as error:
        sys.exit(_complain(f"{error.format_message()} See `holdfast --help`."))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_complain("interrupted", code=130))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
        sys.exit(1)
    sys.exit(code or 0)


@lab.command("list")
def lab_list() -> None:
    """List the experiments. Example: holdfast lab list"""
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
    from holdfast.lab import report
    from holdfast.lab.registry import experiment
    from holdfast.lab.result import prepare

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
    with _meter() as meter:
        result = chosen.run(options, meter)
    _print_claims(result)
    Console().print(f"report: {report.write(result, folder)}", soft_wrap=True)
    raise typer.Exit(0 if result.holds else 1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the reports.")] = Path("results/demo"),
) -> None:
    """See in a minute what a failure costs, and what partial recovery saves. Example: holdfast demo"""
    from holdfast.lab import demo as parts

    with _meter() as meter:
        results = list(parts.run(out, meter))
    for (result, page), (title, table) in zip(results, DEMO, strict=True):
        Console().print(title, table(result), sep="\n", highlight=False)
        held = sum(claim.holds for claim in result.claims)
        Console().print(
            f"{held} of {len(result.claims)} claims hold; report: {page}\n", highlight=False, soft_wrap=True
        )
    raise typer.Exit(0 if all(result.holds for result, _ in results) else 1)


@app.command()
def inspect(
    store: Annotated[str, typer.Argument(help="A directory, or a URL such as s3://bucket/run.")],
) -> None:
    """Show what a checkpoint STORE holds, by its commit records. Example: holdfast inspect runs/a/checkpoints"""
    from holdfast.checkpoint.place import open_store
    from holdfast.checkpoint.scrub import inspect as contents_of

    contents = contents_of(open_store(store))
    table = Table("snapshot", "epoch", "cursor", "workers", "size", "saved")
    for each in contents.snapshots:
        saved = datetime.fromtimestamp(each.saved).astimezone().isoformat(" ", "seconds")
        table.add_row(f"step {each.step}", str(each.epoch), str(each.cursor), str(each.world), _size(each.bytes), saved)
    if contents.snapshots:
        Console().print(table)
    if running := contents.running:
        ages = f"saved at iterations {running.oldest} to {running.newest}"
        Console().print(f"running checkpoint: {running.blocks} blocks, {ages}, {_size(running.bytes)}", highlight=False)
    for bad in contents.unreadable:
        Console().print(f"unreadable: {bad.name}: {bad.why}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if contents.unreadable else 0)


@app.command()
def verify(
    store: Annotated[str, typer.Argument(help="A directory, or a URL such as s3://bucket/run.")],
) -> None:
    """Read every byte of a checkpoint STORE; exit 1 and name what is bad. Example: holdfast verify runs/a/checkpoints"""
    from holdfast.checkpoint import scrub
    from holdfast.checkpoint.place import open_store

    opened = open_store(store)
    with _meter() as meter:
        count = scrub.records(opened)
        findings = scrub.verify(opened, meter("verify", count))
    for bad in findings:
        Console().print(f"bad: {bad.name}: {bad.why}", markup=False, highlight=False, soft_wrap=True)
    if not findings:
        Console().print(f"all good: {count} saves, every byte as it was committed", highlight=False)
    raise typer.Exit(1 if findings else 0)


def _size(count: int) -> str:
    return str(filesize.decimal(count))


def _complain(line: str, code: int = 2) -> int:
    Console(stderr=True).print(f"holdfast: {' '.join(line.split())}", markup=False, highlight=False, soft_wrap=True)
    return code


@contextmanager
def _meter() -> Iterator[Meter]:
    """Live progress bars on stderr; nothing where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def meter(what: str, total: int) -> Progress:
            task = bars.add_task(what, total=total)
            return lambda done: bars.advance(task, done)

        yield meter


def _print_claims(result: Result) -> None:
    from holdfast.lab.report import expected, measured, verdict

    table = Table(result.experiment, "claim", "expected", "measured", title_justify="left")
    for claim in result.claims:
        style = "yellow" if not claim.resolved else "green" if claim.holds else "bold red"
        table.add_row(f"[{style}]{verdict(claim)}[/]", claim.claim, expected(claim), measured(claim))
    Console().print(table)
    for remark in result.remarks:
        Console().print(f"  {remark}", highlight=False)


def _bound_table(result: Result) -> Table:
    """How often costs are within the bound, and how near they come to it."""
    table = Table("perturbations", "trials", "within bound", "highest cost", "its bound")
    for kind in dict.fromkeys(row["kind"] for row in result.rows):
        rows = [row for row in result.rows if row["kind"] == kind]
        within = sum(row["cost"] <= row["bound"] + 1 for row in rows) / len(rows)
        worst = max(rows, key=lambda row: float(row["cost"]))
        table.add_row(kind, str(len(rows)), f"{within:.0%}", f"{worst['cost']:.0f} iterations", f"{worst['bound']:.0f}")
    return table


def _recovery_table(result: Result) -> Table:
    """What each recovery costs, in iterations with a 95 % interval, by the fraction of the parameters lost."""
    table = Table("lost", "full recovery", "partial recovery", "saved")
    for full, partial in zip(result.rows[::2], result.rows[1::2], strict=True):
        table.add_row(full["lost"], *map(_cost, (full, partial)), f"{partial['reduction']:.0%}")
    return table


def _cost(row: Row) -> str:
    return f"{row['cost_mean']:.2f} ± {row['cost_high'] - row['cost_mean']:.2f} iterations"


DEMO = (
    ("What a perturbation can cost, at most: gradient descent on a quadratic program", _bound_table),
    ("What partial recovery saves: logistic regression on digits, a checkpoint every 8 iterations", _recovery_table),
)
