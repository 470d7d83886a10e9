"""`holdfast report`: runs or results as one page to look at."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.console import LOOK, say
from holdfast.extras import require

report = typer.Typer()


@report.command("report", rich_help_panel=LOOK)
def write_report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, which are compared; or of results of the lab."),
    ],
    out: Annotated[
        Path, typer.Option(help="A page (.html), Markdown (.md), or a folder for both, figures and tables.")
    ] = Path("report.html"),
) -> None:
    """Show what runs did and cost on one page, with figures. Example: holdfast report runs/blocking runs/overlapped"""
    require("lab", "`holdfast report`")
    from holdfast.cli import pages
    from holdfast.lab.result import command_line
    from holdfast.report import files

    files.check(out)
    page = pages.page(paths, command_line(sys.argv[1:]), datetime.now(UTC))
    say(f"report: {files.write(page, out)}")
