"""`holdfast demo`: training that is killed twice, audited, priced, advised on, and shown on a page."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.audit import print_findings
from holdfast.cli.console import LAB, say
from holdfast.cli.cost import print_compared
from holdfast.errors import BadInput
from holdfast.extras import missing

demo = typer.Typer()


@demo.command("demo", rich_help_panel=LAB)
def run_demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs; those of an earlier demo are replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Kill a training twice, see that it goes on, that no sample was lost, and what it cost. Example: holdfast demo"""
    from holdfast.audit.verdicts import worst
    from holdfast.cost import compare
    from holdfast.demo import demo as parts

    _clear(list(parts.folders(out).values()))
    steps = " and ".join(map(str, parts.KILLED_AT))
    say(f"Training on made-up digits with {parts.WORKERS} workers. In steps {steps}, in the middle of backward, rank")
    say(
        f"{parts.KILLED_RANK} is killed: under `restart` all go on from the newest snapshot; under `replay` the others wait"
    )
    say("for a replacement and the step is the exact one; under `forward` they finish it without the lost samples.")
    shown = []
    for each in parts.run(out):
        shown.append(each)
        say(f"{each.name}: {each.verdict.line}; audit: {worst(each.findings)}")
    say("\nWas it right? What the audit of the last run checked, from its history alone:")
    print_findings(shown[-1].findings)
    say("\nWhat did it cost?")
    print_compared(compare.compare({each.name: each.spent for each in shown}))
    say("\nWhat should I choose? From the run that restarted, for a machine that fails every four hours:")
    _print_advice(parts.folders(out)["restart"])
    last = shown[-1].folder
    say(f"\nruns: {out}; look again with `holdfast audit {last}`, `holdfast cost {last}`, `holdfast advise {last}`")
    _write_report(out)
    right = all(worst(each.findings) == "pass" and each.verdict.verdict == "completed" for each in shown)
    raise typer.Exit(0 if right else 1)


def _clear(folders: list[Path]) -> None:
    """Remove the runs of an earlier demo, and nothing else."""
    for folder in folders:
        if folder.exists():
            if not (folder / "run.json").exists():
                raise BadInput(f"{folder} is not the run of a demo: name another folder with --out")
            shutil.rmtree(folder)


def _print_advice(folder: Path) -> None:
    from holdfast.advice.question import Question
    from holdfast.cli.asking import advice_on
    from holdfast.history.log import read_history

    advice = advice_on(read_history(folder).events, Question(mtbf=4 * 3600))
    say(advice.line)
    for reason in advice.reasons:
        say(f"- {reason}")


def _write_report(out: Path) -> None:
    """All runs on one page, where what draws it is installed."""
    if missing("lab"):
        say("report: none, since the page is drawn by the extra lab: pip install 'holdfast[lab]'")
        return
    from holdfast.cli import pages
    from holdfast.demo import demo as parts
    from holdfast.report import files

    page = pages.page(list(parts.folders(out).values()), "holdfast demo", datetime.now(UTC))
    say(f"report: {files.write(page, out / 'report.html')}")
