"""A look for the end of a run that the other nodes completed while this one waited for them.

Nodes that share the run's folder find its histories there. Otherwise supervisors send their histories to the place of
the checkpoints when they end.
"""

from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.events import SUPERVISED_ONLY, Judged
from holdfast.history.log import recall
from holdfast.history.tail import Finish, finish
from holdfast.supervise.checkpoint_place import Checkpoints, PlaceContents
from holdfast.supervise.verdict import RunVerdict, completion, done_before, done_elsewhere


class RunEndWatch:
    """Looks for the end of the run in the folder `out`, and at the place of its checkpoints.

    An end that was there before does not count if the run is extended, if the script is only supervised, which every
    command trains again, or if it is found at the place of the checkpoints, which may have been another run's.
    """

    def __init__(self, out: Path, checkpoints: Checkpoints, contents: PlaceContents, *, extends: bool) -> None:
        self._history, self._checkpoints = out / "history", checkpoints
        self.verdict: RunVerdict | None = None
        """The verdict of the other nodes, once a look has found one."""
        before = _completion(self._history)
        self._known: set[Finish | Judged | None] = {None, contents.completed}
        if extends:
            self._known |= {finish(self._history), before}
        elif before and SUPERVISED_ONLY in before.because:
            self._known.add(before)

    def look(self) -> RunVerdict | None:
        """Return the verdict on a run that has ended; what cannot be read now may be readable at the next look."""
        with suppress(HoldfastError, OSError):
            self.verdict = self._find()
        return self.verdict

    def _find(self) -> RunVerdict | None:
        end = finish(self._history)
        if end and end not in self._known:
            return done_before(end, self._checkpoints.newest())
        for judged in (_completion(self._history), self._checkpoints.completed()):
            if judged and judged not in self._known:
                return done_elsewhere(judged.attempts, judged.because)
        return None


def _completion(history: Path) -> Judged | None:
    files = history.glob("supervisor-*.jsonl")
    with suppress(HoldfastError):  # the audit reports damage
        return completion(event.what for file in files for event in recall(file, "launch", "restart", "verdict"))
    return None
