"""Whether the run has come to its end without this node, which waits for the others meanwhile: it looks again and again.

Where nodes share the run's folder, ranks and supervisors tell it there. Where they do not, supervisors send what they
told to the place of the checkpoints once they have ended.
"""

from contextlib import suppress
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.events import SUPERVISED_ONLY, Judged
from holdfast.history.log import recall
from holdfast.history.tail import Finish, finish
from holdfast.supervise.checkpoint_place import Checkpoints, PlaceContents
from holdfast.supervise.verdict import RunVerdict, completion, done_before, done_elsewhere


class Ended:
    """Looks for the end of the run in the folder `out`, or where its checkpoints are.

    Not every end that was there when we came is one: a run may be extended, a script that is supervised only is trained
    by every command, and a place of checkpoints may have been another run's before.
    """

    def __init__(self, out: Path, checkpoints: Checkpoints, found: PlaceContents, *, extends: bool) -> None:
        self._history, self._checkpoints = out / "history", checkpoints
        before = _completion(self._history)
        self._known: set[Finish | Judged | None] = {None, found.completed}
        if extends:
            self._known |= {finish(self._history), before}
        elif before and SUPERVISED_ONLY in before.because:
            self._known.add(before)

    def look(self) -> RunVerdict | None:
        """The verdict on a run that has ended; what cannot be read now may be at the next look."""
        with suppress(HoldfastError, OSError):
            end = finish(self._history)
            if end and end not in self._known:
                return done_before(end, self._checkpoints.newest())
            for judged in (_completion(self._history), self._checkpoints.completed()):
                if judged and judged not in self._known:
                    return done_elsewhere(judged.attempts, judged.because)
        return None


def _completion(history: Path) -> Judged | None:
    files = history.glob("supervisor-*.jsonl")
    with suppress(HoldfastError):  # what is damaged is the audit's to tell
        return completion(event.what for file in files for event in recall(file, "launch", "restart", "verdict"))
    return None
