"""Reads what the workers of a run printed, as text without control codes or overwritten progress bars."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import BadInput

LOG_FOLDER = "logs/attempt-{:04d}"  # of the files to which the workers of an attempt print
STANDBY = "standby"  # beside them, while they belong to an attempt that has not begun
RANKS = "ranks.jsonl"  # beside them: the workers whose rank changed, where lost members are replaced
LONGEST = 1 << 20  # bytes of a line that are shown together
_NAME = re.compile(r"(rank|worker)-([0-9]{1,9})\.(out|err)")
# Escape sequences: those that draw and colour, those that end in a bell or a string terminator, and the short ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """The stdout or stderr file of one worker."""

    path: Path
    who: str  # "rank N", or "worker N" if it joined later to replace a lost one
    stream: str
    attempt: int
    later: tuple[int, ...] = ()  # the ranks that it got after its start

    @property
    def title(self) -> str:
        later = f", later rank {', '.join(map(str, self.later))}" if self.later else ""
        return f"{self.who}{later}, attempt {self.attempt}, {'stdout' if self.stream == 'out' else 'stderr'}"

    @property
    def order(self) -> tuple[str, int, bool]:
        """A key to sort logs: first workers of the initial start, by rank, then replacements; stdout before stderr."""
        kind, number = self.who.split()
        return kind, int(number), self.stream != "out"

    def lines(self, start: int = 0) -> Iterator[tuple[str, int]]:
        """Yield each line after byte offset `start` as plain text, and the offset of its end.

        If a line was redrawn, as progress bars are, only its final text is yielded. An unfinished last line is left out
        unless `start` is 0."""
        with self.path.open("rb") as file:
            file.seek(start)
            while line := file.readline(LONGEST):
                if start and len(line) < LONGEST and not line.endswith(b"\n"):
                    return
                text = line.decode(errors="replace").removesuffix("\n").rstrip("\r").rpartition("\r")[2]
                yield _ESCAPES.sub("", text).expandtabs(), file.tell()


def find_logs(
    run: Path, attempt: int | None = None, rank: int | None = None, *, only_err: bool = False
) -> list[WorkerLog]:
    """Return the sorted logs of the workers of a run.

    With `attempt`, only logs of this attempt are returned. With `rank`, only logs of workers that ever had this rank
    are returned."""
    folders = {
        int(match[1]): path
        for path in (run / "logs").glob("attempt-*")
        if (match := re.fullmatch(r"attempt-([0-9]{4,18})", path.name))
        and path.is_dir()
        and not (path / STANDBY).exists()
    }
    if not folders:
        raise BadInput(f"{run} holds no logs: name the folder of a run that has started workers.")
    if attempt is not None and attempt not in folders:
        raise BadInput(f"{run} has no logs of attempt {attempt}: it has those of {_list_numbers(sorted(folders))}.")
    found: list[WorkerLog] = []
    ranks: set[int] = set()
    for number in sorted(folders) if attempt is None else [attempt]:
        changes = read_rank_changes(folders[number])
        logs = _logs_of_attempt(folders[number], number, changes)
        ranks |= {log.order[1] for log in logs if log.who.startswith("rank")} | {became for became, _ in changes}
        found += logs if rank is None else _logs_of_rank(logs, changes, rank)
    if rank is not None and not found:
        where = run if attempt is None else f"attempt {attempt}"
        raise BadInput(f"{where} has no logs of rank {rank}: it has those of {_list_numbers(sorted(ranks))}.")
    return [log for log in found if log.stream == "err" or not only_err]


def _logs_of_attempt(folder: Path, attempt: int, changes: list[tuple[int, str]]) -> list[WorkerLog]:
    found = []
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            became = dict.fromkeys(rank for rank, name in changes if name == path.stem != f"rank-{rank}")
            found.append(WorkerLog(path, f"{match[1]} {match[2]}", match[3], attempt, tuple(became)))
    return sorted(found, key=lambda log: log.order)


def _logs_of_rank(found: list[WorkerLog], changes: list[tuple[int, str]], rank: int) -> list[WorkerLog]:
    names = [f"rank-{rank}", *(name for became, name in changes if became == rank)]
    return sorted((log for log in found if log.path.stem in names), key=lambda log: names.index(log.path.stem))


def read_rank_changes(folder: Path) -> list[tuple[int, str]]:
    """Return pairs (rank, log file name of the worker that took over this rank), oldest first."""
    path, changes = folder / RANKS, []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, OverflowError, RecursionError):  # a line that was cut off, or not ours
            rank, name = json.loads(line)
            changes.append((int(rank), str(name)))
    return changes


def _list_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "") if numbers else "none"
