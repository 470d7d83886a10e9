"""`holdfast scale`: put workers of an active run to sleep, or wake them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.console import say


def scale(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an active run with live recovery.")],
    workers: Annotated[int, typer.Option(help="Number of workers that train; the others sleep.")],
) -> None:
    """Put workers to sleep, or wake them, without a restart. Example: holdfast scale runs/train --workers 2"""
    from holdfast.supervise.scale_request import scale

    with Console(stderr=True).status(f"waiting until {workers} train"):
        done = scale(path, workers)
    say(f"{workers} workers train, after {done.seconds:.2f} s (membership {done.number})")
