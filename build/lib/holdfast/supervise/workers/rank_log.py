"""The record of the rank of each worker on one node, for messages to the user and for readers of the logs.

A process keeps its rank for life. With live recovery, the rank of a lost worker passes to the worker that replaces it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.distributed.membership import Membership
from holdfast.runs.logs import LOG_FOLDER, RANKS


class RankLog:
    """A record of the rank of each worker of this node, for messages to the user and for readers of the logs."""

    def __init__(self, out: Path, attempt: int) -> None:
        self._out, self._attempt = out, attempt
        self._names: dict[int, str] = {}  # the worker of each rank, by the name of its files; empty: of another node
        self._lines: list[str] = []
        self._is_replacing = False  # a worker was told to join, and has not yet
        self._has_main = True  # a worker has rank 0

    def follow(self, membership: Membership, names: Mapping[int, str]) -> None:
        """Record the ranks in a new membership. `names` maps each rank on this node to the name of its log files."""
        changed = []
        for rank in membership.members:
            before, name = self._names.get(rank, f"rank-{rank}"), names.get(rank, "")
            self._names[rank] = name
            if name == before:
                continue
            self._is_replacing |= rank in membership.joining
            if name:
                changed.append((rank, name))
                self._lines.append(f"rank {rank} is now {name}, {LOG_FOLDER.format(self._attempt)}/{name}.out")
        if self._has_main and 0 not in membership.members:
            self._lines.append("rank 0 is lost: until its replacement joins, run.is_main is true on no worker")
        self._has_main = 0 in membership.members
        if changed:
            text = "".join(json.dumps(change) + "\n" for change in changed)
            path = self._out / LOG_FOLDER.format(self._attempt) / RANKS
            with suppress(OSError), path.open("a") as file:  # a disk that refuses does not end the run
                file.write(text)

    def news(self, *, all_train: int) -> list[str]:
        """Return messages about new rank changes. `all_train` is the number of workers if all of them train, else 0."""
        lines, self._lines = self._lines, []
        if all_train and self._is_replacing:
            self._is_replacing = False
            lines.append(f"all {all_train} workers train again")
        return lines
