"""The supervisor's journal: its own history of the run, for the audit.

A disk that refuses a line does not end the training: the user is warned, and the line is tried again.
"""

from pathlib import Path
from types import TracebackType

from holdfast.errors import StorageFailed
from holdfast.events import Detect, Launch, Restart, What
from holdfast.history.log import HistoryWriter, recall
from holdfast.runs.arguments import changes
from holdfast.runs.config import RunConfig
from holdfast.supervise.display import Display
from holdfast.supervise.failure_cause import FirstFailure


class Journal:
    """The history file of one supervisor, open until the verdict."""

    def __init__(self, folder: Path, who: str, display: Display) -> None:
        self._history, self._display = HistoryWriter(folder, who), display
        self._shown: set[tuple[str, str]] = set()  # errors whose traceback was shown

    def append(self, what: What) -> None:
        """Write an event and sync it."""
        self._history.append(what)
        try:
            self._history.flush()
            self._history.sync()
        except StorageFailed as error:
            self._display.warn(str(error))

    def launch(self, config: RunConfig, attempt: int, workers: int, nodes: int) -> None:
        """Record the first start of this command, and how its arguments differ from the command before."""
        argv = (config.script, *config.args)
        launches = [event.what for event in recall(self._history.path, "launch")]
        last = next((what.argv for what in reversed(launches) if isinstance(what, Launch)), argv)
        self.append(
            Launch(
                attempt=attempt,
                workers=workers,
                argv=argv,
                nodes=nodes,
                source=config.source.place if config.source else None,
                weights=config.weights,
                extends=config.extend,
                changed=tuple(change.name for change in changes(last[1:], argv[1:])),
            )
        )

    def detect(self, attempt: int, failure: FirstFailure) -> None:
        """Record and show a failure; the traceback of an error is shown once."""
        worker = (attempt, failure.rank, failure.local_rank)
        self.append(Detect(*worker, failure.kind, failure.message, failure.exit, failure.signal, failure.step))
        self._display.output.copy()
        if failure.traceback and failure.kind == "error" and failure.error[:2] not in self._shown:
            self._shown.add(failure.error[:2])
            self._display.show(f"rank {failure.rank} raised, in attempt {attempt}:", failure.traceback)
        else:
            self._display.say(failure.line, style="yellow")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._history.close()
        except StorageFailed as refused:  # the verdict stands
            self._display.warn(str(refused))


def last_attempt(path: Path) -> int:
    """Return the number of the last attempt in the journal at `path`; 0 if there is none."""
    started = (event.what for event in recall(path, "launch", "restart"))
    return max((what.attempt for what in started if isinstance(what, Launch | Restart)), default=0)
