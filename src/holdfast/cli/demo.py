"""`holdfast demo`: a training run that is killed twice, with its audit, cost, advice and report."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.advise import advice_on
from holdfast.cli.audit import print_findings
from holdfast.cli.console import say
from holdfast.cli.cost import print_compared
from holdfast.errors import BadInput
from holdfast.extras import missing


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs; the runs of an earlier demo are replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small model, kill a worker twice, and show the recovery, the audit and the cost. Example: holdfast demo"""
    from holdfast.advice.question import Question
    from holdfast.audit.verdicts import worst
    from holdfast.cost import compare
    from holdfast.demo import demo as parts
    from holdfast.history.log import read_history

    for folder in parts.folders(out).values():  # of an earlier demo
        if folder.exists():
            if not (folder / "run.json").exists():
                raise BadInput(f"{folder} is not the run of a demo: name another folder with --out.")
            shutil.rmtree(folder)
    steps = " and ".join(map(str, parts.KILLED_AT))
    say(f"Training on synthetic digits with {parts.WORKERS} workers. In the backward pass of steps {steps},")
    say(
        f"rank {parts.KILLED_RANK} is killed. Under `restart` all workers restart from the newest snapshot. Under `replay`"
    )
    say("the survivors wait for a replacement and repeat the step exactly. Under `forward` they finish it without")
    say("the lost samples.")
    shown = []
    for demo_run in parts.run(out):
        shown.append(demo_run)
        say(f"{demo_run.name}: {demo_run.verdict.line}; audit: {worst(demo_run.findings)}")
    say("\nWas it correct? The audit of the last run, from its history:")
    print_findings(shown[-1].findings)
    say("\nWhat did it cost?")
    print_compared(compare.compare({demo_run.name: demo_run.spent for demo_run in shown}))
    say("\nWhich recovery should I choose? Advice from the `restart` run, for one failure every four hours:")
    advice = advice_on(read_history(parts.folders(out)["restart"]).events, Question(mtbf=4 * 3600))
    say(advice.line)
    for line in advice.figures[1:]:
        say(f"- {line}")
    last = shown[-1].folder
    say(f"\nruns: {out}; look again with `holdfast audit {last}`, `holdfast cost {last}`, `holdfast advise {last}`")
    if missing("lab"):
        say("report: not written, because it needs the extra lab: pip install 'holdfast[lab]'")
    else:
        from holdfast.cli.report import page_of
        from holdfast.report import files

        page = page_of(list(parts.folders(out).values()), "holdfast demo", datetime.now(UTC))
        say(f"report: {files.write(page, out / 'report.html')}")
    is_right = all(worst(r.findings) == "pass" and r.verdict.verdict == "completed" for r in shown)
    raise typer.Exit(0 if is_right else 1)
