"""Folds this node's histories into segments while the workers train, in a child process of low priority."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.history.fold import KEPT, LEAST, fold
from holdfast.supervise.child_call import ChildCall

PAUSE = 5.0  # seconds between two looks at the sizes of the files
LEAST_AT_END = 1 << 18  # bytes of lines that are worth a segment when the run has ended
ENDS_WITHIN = 60.0


class HistoryFolding:
    """The folding of the history files in the folder `history`, of which this node writes those of its ranks."""

    def __init__(self, history: Path) -> None:
        self._history = history
        self._call: ChildCall | None = None
        self._next = 0.0
        self._sizes: dict[Path, int] = {}  # when they were folded last

    def look(self, now: float, ranks: Collection[int] | None) -> None:
        """Begin to fold the files of `ranks` (None: all) if one of them has grown enough. `now` is a time in seconds."""
        if now < self._next or (self._call and not self._call.is_done()):
            return
        self._call, self._next = None, now + PAUSE
        self._begin(ranks, LEAST)

    def finish(self, ranks: Collection[int] | None) -> None:
        """Fold what is left after the end of the run, if it is worth it."""
        self._wait(ENDS_WITHIN)
        self._begin(ranks, LEAST_AT_END)
        self._wait(ENDS_WITHIN)

    def close(self) -> None:
        """End the child process, if there is one: what it has not folded stays as it is."""
        self._wait(0.0)

    def _wait(self, seconds: float) -> None:
        call, self._call = self._call, None
        if call:
            with suppress(HoldfastError):  # then the lines stay as they are
                call.result(seconds)

    def _begin(self, ranks: Collection[int] | None, least: int) -> None:
        sizes = {file: file.stat().st_size for file in self._history.glob("rank-*.jsonl")}
        if any(size - self._sizes.get(file, 0) >= least + KEPT for file, size in sizes.items()):
            self._sizes = sizes
            self._call = ChildCall(lambda: _fold(self._history, ranks, least), "the folding of the history")


def _fold(history: Path, ranks: Collection[int] | None, least: int) -> int:
    os.nice(19)
    return fold(history, ranks, least=least)
