"""What lies in the folders that a report is asked for: runs, served runs or results of the lab, never a mixture."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.history.log import files_of, read_history
from holdfast.lab import result_page
from holdfast.lab.result import environment
from holdfast.lab.result_page import RESULT, environment_line
from holdfast.report import runs
from holdfast.report.page import Page
from holdfast.report.run_data import names, ran
from holdfast.runs.status import is_run, runs_in, trains
from holdfast.server import report
from holdfast.server.cost import is_served

RESULTS, RUNS, SERVED = "results of the lab", "runs", "runs of a parameter server"


def page(paths: Sequence[Path], command: str, now: datetime | None = None) -> Page:
    """The page about what lies in these folders; one that holds several runs or results stands for all of them."""
    folders = [folder for path in paths for folder in _within(path)]
    kinds = {folder: _kind(folder) for folder in folders}
    if len(set(kinds.values())) > 1:
        ones = [next(folder for folder in folders if kinds[folder] == kind) for kind in dict.fromkeys(kinds.values())]
        said = " and ".join(f"{folder} is of {kinds[folder]}" for folder in ones)
        raise BadInput(f"these do not go on one page: {said}; ask for a report of each kind.")
    if kinds[folders[0]] == RESULTS:
        return result_page.combined([result_page.read(folder) for folder in folders])
    facts = made(command, now)
    called = names(folders)
    if kinds[folders[0]] == SERVED:
        return report.page([report.served_run(*each) for each in zip(folders, called, strict=True)], facts)
    return runs.page([ran(*each, audited=not trains(each[0])) for each in zip(folders, called, strict=True)], facts)


def live_page(folder: Path, command: str) -> Page:
    """The page about one run that may go on; the audit is left out until it has ended."""
    facts, over = made(command, None), not trains(folder)
    name = names([folder])[0]
    if _kind(folder) == SERVED:
        return report.page([report.served_run(folder, name, audited=over)], facts, live=True)
    return runs.page([ran(folder, name, audited=over)], facts, live=True)


def made(command: str, now: datetime | None) -> dict[str, str]:
    """Where a page comes from."""
    when = {"Made": f"{now:%Y-%m-%d %H:%M} UTC"} if now else {}
    return {"Command": command, **when, "Environment": f"this page was made with {environment_line(environment())}"}


def _within(path: Path) -> list[Path]:
    if not path.exists():
        raise BadInput(f"there is no folder {path}: name that of a run or of a result.")
    if (path / RESULT).is_file() or is_run(path) or any(path.glob("*.jsonl")):
        return [path]
    found = runs_in(path) or sorted(each.parent for each in path.glob(f"*/{RESULT}"))
    if not found:
        raise BadInput(
            f"{path} is neither a run nor a result: name the folder of `holdfast run`, `holdfast serve train` or "
            "`holdfast lab run`."
        )
    return found


def _kind(folder: Path) -> str:
    if (folder / RESULT).is_file():
        return RESULTS
    controller = next((file for file in files_of(folder) if file.stem == "controller"), None)
    return SERVED if controller and is_served(read_history(controller).events) else RUNS
