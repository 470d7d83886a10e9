"""Which worker is which rank, where members are lost and others take their places.

A worker prints to files of one name for as long as it lives, whatever its rank becomes. So what changes is told to
whoever watches, and kept beside these files for whoever reads them later.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs torch, for which nobody waits who only reads
    from holdfast.distributed.membership import Membership

FILE = "ranks.jsonl"


class RankLog:
    """The ranks of the workers of this node, from membership to membership of the attempt with this number in `out`."""

    def __init__(self, out: Path, attempt: int) -> None:
        self.logs = Path("logs") / f"attempt-{attempt:04d}"
        self._out = out
        self._now: dict[int, str] = {}  # who is each rank, by the name of its files; nothing: a worker of another node
        self._lines: list[str] = []
        self._expected = False  # whether somebody was let in that is yet to come

    def follow(self, told: "Membership", names: Mapping[int, str]) -> None:
        """There is another membership, and these are the names of the workers of this node, by their numbers."""
        changed = []
        for rank, number in enumerate(told.members):
            before, name = self._now.get(rank, f"rank-{rank}"), names.get(number, "")
            self._now[rank] = name
            if name == before:
                continue
            self._expected |= number in told.joining
            if name:
                changed.append((rank, name))
            if name and (rank == 0 or number in told.joining):
                self._lines.append(f"rank {rank} is now {_known_as(name)}, {self.logs / name}.out")
        if changed:
            self._keep(changed)

    def news(self, *, all_train: int) -> list[str]:
        """Lines on what has changed since this was asked last; `all_train`: how many, if all train together, else 0."""
        lines, self._lines = self._lines, []
        if all_train and self._expected:
            self._expected = False
            lines.append(f"all {all_train} workers train again")
        return lines

    def _keep(self, changed: list[tuple[int, str]]) -> None:
        text = "".join(json.dumps(each) + "\n" for each in changed)
        with suppress(OSError), (self._out / self.logs / FILE).open("a") as file:  # a disk that refuses ends no run
            file.write(text)


def _known_as(name: str) -> str:
    return f"the worker that began as rank {name[5:]}" if name.startswith("rank-") else name


def read(folder: Path) -> list[tuple[int, str]]:
    """Which ranks workers became after they were started, by the names of their files in this folder, in that order."""
    path, found = folder / FILE, []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, OverflowError):  # a line that was cut off, or is none of ours
            rank, name = json.loads(line)
            found.append((int(rank), str(name)))
    return found
