"""`holdfast audit`: prove from its history what a run trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.console import cell, say

if TYPE_CHECKING:
    from holdfast.audit.verdicts import Finding

COLOURS = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def audit(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of its history.")],
    node_folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--node-folder",
            metavar="DIR",
            help="The folder of the same run on another node; repeatable. By default the histories of other nodes are "
            "fetched from the checkpoint store.",
        ),
    ] = None,
) -> None:
    """Check, from the history of a run, that it trained every sample exactly once or declared it lost. Example: holdfast audit runs/train"""
    from holdfast.audit.verdicts import audit_run, worst
    from holdfast.cli.final_audit import next_steps
    from holdfast.runs.histories import open_history

    with open_history(path, node_folders or ()) as history:
        findings = audit_run(history.files, history.facts)
    print_findings(findings)
    for step in next_steps(findings, history.config):
        say(f"next: {step}")
    raise typer.Exit(0 if worst(findings) == "pass" else 1)


def print_findings(findings: Sequence["Finding"]) -> None:
    from holdfast.audit.verdicts import worst

    table = Table("check", "verdict", "because", box=None)
    for finding in findings:
        colour = COLOURS[finding.verdict]
        verdict = f"[{colour}]{finding.verdict}[/]"
        table.add_row(finding.check.replace("_", " "), verdict, cell(finding.because))
    Console().print(table)
    say(f"audit: {worst(findings)}")
