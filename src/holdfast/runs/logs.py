"""What the workers of a run printed, as text to be read later: progress bars as they stood last, no control codes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.runs import rank_log

_NAME = re.compile(r"(rank|worker)-([0-9]{1,9})\.(out|err)")
# Escape sequences: those that draw and colour, those that end in a bell or a string terminator, and the short ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """What one worker printed to its stdout or stderr; `who` is the rank that it began as, or its seat if it joined later.

    In a run that recovers live it may have become other ranks since, which are in `later`.
    """

    path: Path
    who: str
    stream: str
    later: tuple[int, ...] = ()

    def lines(self) -> Iterator[str]:
        """Line by line; of a line that was written over, what stood there last."""
        with self.path.open(errors="replace", newline="\n") as file:
            for line in file:
                yield _ESCAPES.sub("", line.rstrip("\r\n").rpartition("\r")[2]).expandtabs()


def logs(run: Path, attempt: int | None = None, rank: int | None = None) -> tuple[int, list[WorkerLog]]:
    """The logs of an attempt, the last one if none is named, of all its workers or of one rank; and its number.

    Those of a rank are of every worker that was this rank, in that order.
    """
    folders = _attempts(run)
    if not folders:
        raise BadInput(f"{run} holds no logs: name the folder of a run that has started workers.")
    number = max(folders) if attempt is None else attempt
    if number not in folders:
        raise BadInput(f"{run} has no logs of attempt {number}: it has those of {_listed(sorted(folders))}.")
    changes = rank_log.read(folders[number])
    found = sorted(
        _logs(folders[number], changes),
        key=lambda log: (log.who.split()[0], int(log.who.split()[1]), log.stream != "out"),
    )
    if rank is not None:
        names = [f"rank-{rank}", *(name for became, name in changes if became == rank)]
        began = [int(log.who.split()[1]) for log in found if log.who.startswith("rank")]
        found = sorted((log for log in found if log.path.stem in names), key=lambda log: names.index(log.path.stem))
        if not found:
            known = sorted({*began, *(became for became, _ in changes)})
            raise BadInput(f"attempt {number} has no logs of rank {rank}: it has those of {_listed(known)}.")
    return number, found


def _attempts(run: Path) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in (run / "logs").glob("attempt-*")
        if (match := re.fullmatch(r"attempt-([0-9]{4,18})", path.name)) and path.is_dir()
    }


def _logs(folder: Path, changes: list[tuple[int, str]]) -> Iterator[WorkerLog]:
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            became = dict.fromkeys(rank for rank, name in changes if name == path.stem != f"rank-{rank}")
            yield WorkerLog(path, f"{match[1]} {match[2]}", match[3], tuple(became))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "") if numbers else "none"
