"""`holdfast scale`: change the number of workers that train in an active run; the others are suspended."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.console import say


def scale(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an active run with live recovery.")],
    workers: Annotated[int, typer.Option(help="Number of workers that train; the others are suspended.")],
) -> None:
    """Change the number of workers that train, without a restart. Example: holdfast scale runs/train --workers 2"""
    from holdfast.supervise.scale_request import scale

    with Console(stderr=True).status(f"waiting until {workers} train"):
        done = scale(path, workers)
    say(f"{workers} workers train, after {done.seconds:.2f} s (membership {done.number})")
