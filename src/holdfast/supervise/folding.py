"""Folds this node's histories into segments while the workers train, in a child process of low priority."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.history.fold import KEPT, LEAST, fold
from holdfast.supervise.child_call import ChildCall

PAUSE = 5.0  # seconds between two looks at the sizes of the files
ENDS_WITHIN = 60.0
NAME = "the folding of the history"


class HistoryFolding:
    """The folding of the history files in the folder `history`, of which this node writes those of its ranks.

    `newest` returns the step of the newest snapshot. The child process calls it if the history of rank 0
    leaves nothing to fold."""

    def __init__(self, history: Path, newest: Callable[[], int | None]) -> None:
        self._history, self._newest = history, newest
        self._call: ChildCall | None = None
        self._next = 0.0
        self._sizes: dict[Path, int] = {}  # when they were folded last

    def look(self, now: float, ranks: Collection[int] | None) -> None:
        """Begin to fold the files of `ranks` (None: all) if one of them has grown enough. `now` is a time in seconds."""
        if now < self._next or (self._call and not self._call.is_done()):
            return
        self._call, self._next = None, now + PAUSE
        sizes = self._sizes_now()
        if any(size - self._sizes.get(file, 0) >= LEAST + KEPT for file, size in sizes.items()):
            self._sizes = sizes
            self._call = self._begin(ranks, is_over=False)

    def finish(self, ranks: Collection[int] | None) -> None:
        """Fold what is left after the end of a long run."""
        self._wait(ENDS_WITHIN)
        if max(self._sizes_now().values(), default=0) >= LEAST:
            self._call = self._begin(ranks, is_over=True)
            self._wait(ENDS_WITHIN)

    def close(self) -> None:
        """End the child process, if there is one: what it has not folded stays as it is."""
        self._wait(0.0)

    def _wait(self, seconds: float) -> None:
        call, self._call = self._call, None
        if call:
            with suppress(HoldfastError):  # then the lines stay as they are
                call.result(seconds)

    def _begin(self, ranks: Collection[int] | None, *, is_over: bool) -> ChildCall:
        def folded() -> int:
            os.nice(19)
            return fold(self._history, ranks, newest=self._newest, least=1 if is_over else LEAST, is_over=is_over)

        return ChildCall(folded, NAME)

    def _sizes_now(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in self._history.glob("rank-*.jsonl")}
