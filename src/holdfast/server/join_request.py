"""A wish for more nodes, left in the folder of a run by somebody else and taken by whoever drives it."""

import os
from pathlib import Path

from holdfast.errors import BadInput

NAME = "join"


class Wish:
    """How many nodes are to join a run: one wish at a time."""

    def __init__(self, out: Path) -> None:
        self._path = out / NAME

    def make(self, nodes: int) -> None:
        """Ask for so many more nodes."""
        if nodes < 1:
            raise BadInput(f"{nodes} nodes cannot join: give 1 or more")
        temporary = self._path.with_suffix(".new")
        temporary.write_text(str(nodes))
        os.replace(temporary, self._path)

    def take(self) -> int:
        """How many nodes are asked for; nobody else takes the same wish."""
        try:
            wanted = int(self._path.read_text())
            self._path.unlink()
        except (FileNotFoundError, ValueError):
            return 0
        return wanted
