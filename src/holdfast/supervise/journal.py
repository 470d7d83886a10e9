"""What a supervisor tells of its run: its own history, for the audit, and beside it the view of whoever watches.

A disk that refuses does not end the training: that is said, and what it refused is tried again.
"""

from pathlib import Path
from types import TracebackType

from holdfast.errors import StorageFailed
from holdfast.events import Detect, Launch, Restart, What
from holdfast.history.log import HistoryWriter, recall
from holdfast.runs.arguments import changes
from holdfast.runs.config import RunConfig
from holdfast.supervise.display import View
from holdfast.supervise.failure_cause import Casualty


class Journal:
    """The history of one supervisor, open until it has said how the run ended."""

    def __init__(self, folder: Path, who: str, view: View) -> None:
        self._history, self._view = HistoryWriter(folder, who), view
        self._shown: set[tuple[str, str]] = set()  # errors of which a traceback was shown

    def note(self, what: What) -> None:
        """Put it on record."""
        self._history.append(what)
        try:
            self._history.flush()
            self._history.sync()
        except StorageFailed as error:
            self._view.warn(str(error))

    def launch(self, config: RunConfig, attempt: int, workers: int, nodes: int) -> None:
        """The workers were started for the first time by this command; in what it differs from the one before is told."""
        argv = (config.script, *config.args)
        told = [event.what for event in recall(self._history.path, "launch")]
        last = next((what.argv for what in reversed(told) if isinstance(what, Launch)), argv)
        self.note(
            Launch(
                attempt=attempt,
                workers=workers,
                argv=argv,
                nodes=nodes,
                source=config.source.place if config.source else None,
                weights=config.weights,
                extends=config.extend,
                changed=tuple(each.name for each in changes(last[1:], argv[1:])),
            )
        )

    def detect(self, attempt: int, lost: Casualty) -> None:
        """Say who failed; what it raised is shown once."""
        who = (attempt, lost.rank, lost.local_rank)
        self.note(Detect(*who, lost.kind, lost.message, lost.exit, lost.signal, lost.step))
        self._view.echo.copy()
        if lost.traceback and lost.kind == "error" and lost.error[:2] not in self._shown:
            self._shown.add(lost.error[:2])
            self._view.show(f"rank {lost.rank} raised, in attempt {attempt}:", lost.traceback)
        else:
            self._view.say(lost.line, style="yellow")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._history.close()
        except StorageFailed as refused:  # the verdict stands
            self._view.warn(str(refused))


def last_attempt(path: Path) -> int:
    """The number of the last attempt that the supervisor with this history has started."""
    started = (event.what for event in recall(path, "launch", "restart"))
    return max((what.attempt for what in started if isinstance(what, Launch | Restart)), default=0)
