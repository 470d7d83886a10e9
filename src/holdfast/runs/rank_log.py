"""The record of which worker has which rank, where lost members are replaced.

A worker prints to files of one name for as long as it lives, whatever its rank becomes. So rank changes are shown to the
user, and kept beside these files for later readers.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs torch, which a reader of logs does not
    from holdfast.distributed.membership import Membership

FILE = "ranks.jsonl"


def log_folder(out: Path, attempt: int) -> Path:
    """Return the folder of the files to which the workers of an attempt print."""
    return out / "logs" / f"attempt-{attempt:04d}"


class RankLog:
    """The ranks of the workers of this node, from membership to membership of one attempt."""

    def __init__(self, out: Path, attempt: int) -> None:
        self._out, self._attempt = out, attempt
        self._names: dict[int, str] = {}  # the worker of each rank, by the name of its files; empty: of another node
        self._lines: list[str] = []
        self._is_replacing = False  # a worker was told to join, and has not yet

    def follow(self, membership: "Membership", names: Mapping[int, str]) -> None:
        """Record a new membership; `names` has the workers of this node, by member number."""
        changed = []
        for rank, number in enumerate(membership.members):
            before, name = self._names.get(rank, f"rank-{rank}"), names.get(number, "")
            self._names[rank] = name
            if name == before:
                continue
            self._is_replacing |= number in membership.joining
            if name:
                changed.append((rank, name))
            if name and (rank == 0 or number in membership.joining):
                worker = f"the worker that began as rank {name[5:]}" if name.startswith("rank-") else name
                self._lines.append(f"rank {rank} is now {worker}, {log_folder(Path(), self._attempt) / name}.out")
        if changed:
            self._append(changed)

    def news(self, *, all_train: int) -> list[str]:
        """Return lines on changes since the last call; `all_train` is the number of workers if all train, otherwise 0."""
        lines, self._lines = self._lines, []
        if all_train and self._is_replacing:
            self._is_replacing = False
            lines.append(f"all {all_train} workers train again")
        return lines

    def _append(self, changed: list[tuple[int, str]]) -> None:
        text = "".join(json.dumps(change) + "\n" for change in changed)
        path = log_folder(self._out, self._attempt) / FILE
        with suppress(OSError), path.open("a") as file:  # a disk that refuses does not end the run
            file.write(text)


def read_rank_changes(folder: Path) -> list[tuple[int, str]]:
    """Return (rank, name of the worker's files) for each change that a log folder records, in order."""
    path, changes = folder / FILE, []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, OverflowError):  # a line that was cut off, or not ours
            rank, name = json.loads(line)
            changes.append((int(rank), str(name)))
    return changes
