"""Reads what the workers of a run printed, as text without control codes or overwritten progress bars."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import BadInput

LOG_FOLDER = "logs/attempt-{:04d}"  # of the files to which the workers of an attempt print
RANKS = "ranks.jsonl"  # beside them: the workers whose rank changed, where lost members are replaced
_NAME = re.compile(r"(rank|worker)-([0-9]{1,9})\.(out|err)")
# Escape sequences: those that draw and colour, those that end in a bell or a string terminator, and the short ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """The stdout or stderr of one worker; `who` names its rank, or its process number if it joined during the attempt.

    `later` has the rank that a worker got when it joined, to replace a lost one."""

    path: Path
    who: str
    stream: str
    later: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[str, int, bool]:
        """A sort key: workers of the first start by rank, then workers that joined later; stdout before stderr."""
        kind, number = self.who.split()
        return kind, int(number), self.stream != "out"

    def lines(self) -> Iterator[str]:
        """Yield the lines as plain text; for a line that was redrawn, such as a progress bar, only its final text."""
        with self.path.open(errors="replace", newline="\n") as file:
            for line in file:
                yield _ESCAPES.sub("", line.rstrip("\r\n").rpartition("\r")[2]).expandtabs()


def logs(run: Path, attempt: int | None = None, rank: int | None = None) -> tuple[int, list[WorkerLog]]:
    """Return the number of an attempt, by default the last one, and the logs of its workers.

    With `rank`, return the logs of all workers that had this rank, in the order in which they had it."""
    folders = {
        int(match[1]): path
        for path in (run / "logs").glob("attempt-*")
        if (match := re.fullmatch(r"attempt-([0-9]{4,18})", path.name)) and path.is_dir()
    }
    if not folders:
        raise BadInput(f"{run} holds no logs: name the folder of a run that has started workers.")
    number = max(folders) if attempt is None else attempt
    if number not in folders:
        raise BadInput(f"{run} has no logs of attempt {number}: it has those of {_list_numbers(sorted(folders))}.")
    changes = read_rank_changes(folders[number])
    found = []
    for path in folders[number].iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            became = dict.fromkeys(rank for rank, name in changes if name == path.stem != f"rank-{rank}")
            found.append(WorkerLog(path, f"{match[1]} {match[2]}", match[3], tuple(became)))
    found.sort(key=lambda log: log.order)
    return number, found if rank is None else _logs_of_rank(found, changes, number, rank)


def read_rank_changes(folder: Path) -> list[tuple[int, str]]:
    """Return the rank changes recorded in a log folder, oldest first, as (new rank, name of the worker's log files)."""
    path, changes = folder / RANKS, []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, OverflowError):  # a line that was cut off, or not ours
            rank, name = json.loads(line)
            changes.append((int(rank), str(name)))
    return changes


def _logs_of_rank(found: list[WorkerLog], changes: list[tuple[int, str]], attempt: int, rank: int) -> list[WorkerLog]:
    names = [f"rank-{rank}", *(name for became, name in changes if became == rank)]
    matching = sorted((log for log in found if log.path.stem in names), key=lambda log: names.index(log.path.stem))
    if not matching:
        began = [log.order[1] for log in found if log.who.startswith("rank")]
        known = sorted({*began, *(became for became, _ in changes)})
        raise BadInput(f"attempt {attempt} has no logs of rank {rank}: it has those of {_list_numbers(known)}.")
    return matching


def _list_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "") if numbers else "none"
