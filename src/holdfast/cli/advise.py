"""`holdfast advise`: which recovery, how often to save, and what a failure will cost, from the history of a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.console import LOOK, say
from holdfast.errors import BadInput, StorageFailed
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.advice.estimate import Estimate
    from holdfast.advice.large_job import Large
    from holdfast.advice.question import Question
    from holdfast.cli.asking import Given

advise = typer.Typer()


@advise.command("advise", rich_help_panel=LOOK)
def advise_run(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of its history.")],
    mtbf: Annotated[
        str,
        typer.Option(
            help="Mean time between failures of the job, such as 4h, 30m, 2d.  [default: as was seen, or published]"
        ),
    ] = "",
    workers_lost: Annotated[
        str,
        typer.Option(help="Part of the workers, or of the blocks, that a failure takes, such as 1/8.  [default: one]"),
    ] = "",
    workers: Annotated[
        int | None, typer.Option(help="Advise for a job of so many workers, simulated from the costs of RUN.")
    ] = None,
    mtbf_per_worker: Annotated[str, typer.Option(help="Mean time between failures of one worker, such as 5y.")] = "",
    restart: Annotated[
        str, typer.Option(help="What a restart takes there, instead of what RUN tells, such as 10m.")
    ] = "",
    stall: Annotated[str, typer.Option(help="What a save makes training later there, such as 30s.")] = "",
    length: Annotated[str, typer.Option("--for", help="How long the simulated job runs.")] = "54d",
    out: Annotated[Path | None, typer.Option(help="Folder for advice.json, advice.png and advice.pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
) -> None:
    """Say which recovery to choose, how often to save and what a failure will cost. Example: holdfast advise runs/train --mtbf 4h"""
    if out:
        require("lab", "--out")
    from holdfast.advice.question import Question, fraction_of, seconds_of
    from holdfast.cli.asking import advice_on
    from holdfast.history.log import read_history
    from holdfast.runs.histories import histories

    question = Question(
        mtbf=seconds_of(mtbf, "--mtbf") if mtbf else None,
        mtbf_per_worker=seconds_of(mtbf_per_worker, "--mtbf-per-worker") if mtbf_per_worker else None,
        lost=fraction_of(workers_lost, "--workers-lost") if workers_lost else None,
        workers=workers,
        restart=seconds_of(restart, "--restart") if restart else None,
        stall=seconds_of(stall, "--stall") if stall else None,
        length=seconds_of(length, "--for"),
    )
    with histories([path]) as files:
        advice = advice_on(read_history(files).events, question)
    if as_json:
        say(json.dumps(advice.to_json(), indent=1))
    else:
        _print(advice)
    if out:
        _write(advice, question, out)
        say(f"advice: {out / 'advice.json'}, advice.png, advice.pdf")


def _print(advice: "Given") -> None:
    from holdfast.advice.advice import Advice

    say(advice.line)
    Console().print(_prices(advice))
    for reason in advice.reasons:
        say(f"- {reason}")
    if advice.unknown:
        say("What this history cannot tell:")
        for line in advice.unknown:
            say(f"- {line}")
    if isinstance(advice, Advice) and advice.large:
        _print_large(advice.large)


def _prices(advice: "Given") -> Table:
    from holdfast.advice.question import in_words

    table = Table("a failure costs", "seconds", "9 of 10 cases", "iterations", "9 of 10 cases", box=None)
    for name, price in advice.prices.items():
        seconds, counted = price.seconds, price.iterations
        table.add_row(
            f"[bold]{name}[/]" if name == advice.recovery else name,
            in_words(seconds.value),
            f"{in_words(seconds.low)} to {in_words(seconds.high)}",
            f"{counted.value:.3g}",
            f"{counted.low:.3g} to {counted.high:.3g}",
        )
    return table


def _print_large(large: "Large") -> None:
    from holdfast.advice.large_job import checked

    say(f"\nThe same as a job of {large.workers} workers, simulated:")
    table = Table("recovery", "trains, of the wall clock", "9 of 10 cases", "save every", box=None)
    for name, share in large.shares.items():
        table.add_row(name, f"{share.value:.1%}", _percents(share), f"{large.every[name]} steps")
    Console().print(table)
    say("It is assumed:")
    for line in large.assumed:
        say(f"- {line}")
    say("\nThe same simulation of jobs that were published:")
    table = Table("job", "published", "simulated", "9 of 10 cases", box=None)
    jobs = checked()
    for job, share in jobs:
        table.add_row(job.name, job.says, f"{share.value:.1%}", _percents(share))
    Console().print(table)
    for job, _ in jobs:
        say(f"- {job.name} ({job.source}): {job.assumed}.")


def _percents(share: "Estimate") -> str:
    return f"{share.low:.1%} to {share.high:.1%}"


def _write(advice: "Given", question: "Question", out: Path) -> None:
    from matplotlib import rc_context

    from holdfast.cli.advice_figure import figure

    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: name a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "advice.json").write_text(json.dumps(advice.to_json(), indent=1) + "\n")
        sheet = figure(advice, question)
        with rc_context({"pdf.fonttype": 42}):  # fonts that others can read, and not drawings of letters
            for suffix in ("png", "pdf"):
                sheet.savefig(out / f"advice.{suffix}", dpi=150)
    except OSError as error:
        raise StorageFailed(f"cannot write to {out}: {error.strerror}; name another folder with --out") from error
