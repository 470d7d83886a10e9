"""`holdfast report`: runs, runs of a parameter server, or results of the lab as one page."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import say
from holdfast.errors import BadInput
from holdfast.extras import require

if TYPE_CHECKING:
    from holdfast.report.page import Page

RESULTS, RUNS, SERVED = "a result of the lab", "a run", "a run of a parameter server"


def report(
    paths: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders to compare, or folders of lab results.")
    ],
    out: Annotated[
        Path,
        typer.Option(help="Where to write: a page (.html), Markdown (.md), or a folder for both, figures and tables."),
    ] = Path("report.html"),
) -> None:
    """Show what runs did and cost on one page, with figures. Example: holdfast report runs/blocking runs/overlapped"""
    require("lab", "`holdfast report`")
    from holdfast.lab.result import command_line
    from holdfast.report import files

    files.check(out)
    page = page_of(paths, command_line(sys.argv[1:]), datetime.now(UTC))
    say(f"report: {files.write(page, out)}")


def page_of(paths: Sequence[Path], command: str, now: datetime | None = None, *, live: bool = False) -> "Page":
    """Return a report page on the runs or lab results at `paths`; any other folder is searched for runs and results.

    The page shows `command` and the time `now`, and reloads itself if `live`. A run that still trains is not audited.
    """
    from holdfast.lab import result_page
    from holdfast.report.run_data import load_run, names
    from holdfast.report.runs_page import page as runs_page
    from holdfast.runs.status import is_training
    from holdfast.server import report as server_report

    folders = [folder for path in paths for folder in _folders(path)]
    kinds = {folder: _kind(folder) for folder in folders}
    if len(set(kinds.values())) > 1:
        examples = {kind: next(folder for folder in folders if kinds[folder] == kind) for kind in kinds.values()}
        text = " and ".join(f"{folder} is {kind}" for kind, folder in examples.items())
        raise BadInput(f"one page cannot show both: {text}. Write a report of each kind.")
    kind = kinds[folders[0]]
    if kind == RESULTS:
        return result_page.combine([result_page.read(folder) for folder in folders])
    named = [(folder, name, not is_training(folder)) for folder, name in zip(folders, names(folders), strict=True)]
    origin = _origin(command, now)
    if kind == SERVED:
        runs = [server_report.served_run(folder, name, audited=ended) for folder, name, ended in named]
        return server_report.page(runs, origin, live=live)
    return runs_page([load_run(folder, name, audited=ended) for folder, name, ended in named], origin, live=live)


def _origin(command: str, now: datetime | None) -> dict[str, str]:
    from holdfast.lab.result import environment
    from holdfast.lab.result_page import environment_line

    made = {"Made": f"{now:%Y-%m-%d %H:%M} UTC"} if now else {}
    return {"Command": command, **made, "Environment": f"this page was made with {environment_line(environment())}"}


def _folders(path: Path) -> list[Path]:
    from holdfast.lab.result_page import RESULT
    from holdfast.runs.status import is_run, runs_in

    if not path.exists():
        raise BadInput(f"there is no folder {path}: name the folder of a run or of a result.")
    if (path / RESULT).is_file() or is_run(path) or any(path.glob("*.jsonl")):
        return [path]
    folders = runs_in(path) or sorted(result.parent for result in path.glob(f"*/{RESULT}"))
    if not folders:
        raise BadInput(
            f"{path} is neither a run nor a result: name the folder of `holdfast run`, `holdfast serve train` or "
            "`holdfast lab run`."
        )
    return folders


def _kind(folder: Path) -> str:
    from holdfast.history.log import files_of, read_history
    from holdfast.lab.result_page import RESULT
    from holdfast.server.cost import is_served

    if (folder / RESULT).is_file():
        return RESULTS
    controller = next((file for file in files_of(folder) if file.stem == "controller"), None)
    return SERVED if controller and is_served(read_history(controller).events) else RUNS
