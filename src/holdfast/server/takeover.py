"""The history of a run's earlier controllers, as read by a controller that takes over."""

from pathlib import Path
from typing import TypeAlias, TypeVar

from holdfast import events
from holdfast.history.log import recall
from holdfast.server.members import Member
from holdfast.server.settings import Settings

Kind = TypeVar("Kind")
Strike: TypeAlias = tuple[int, str, int, str]  # iteration, kind and number of the killed process, point


class ControllerPast:
    """The events recorded by earlier controllers of a run; every method reads the history file again."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings

    def lost(self) -> set[Member]:
        return {Member(what.kind, what.number) for what in self._all(events.Lost)}

    def joined(self) -> set[Member]:
        """Return every node and worker that ever took part in the run."""
        joined = {Member(what.kind, what.number) for what in self._all(events.Joined)}
        nodes = {Member("node", number) for number in range(self._settings.nodes)}
        return joined | nodes | {Member("worker", number) for number in range(self._settings.workers)}

    def moves(self) -> set[tuple[int, int]]:
        """Return all recorded moves of blocks, as pairs (source node, target node)."""
        return {(what.source, what.target) for what in self._all(events.Moved)}

    def strikes(self) -> set[Strike]:
        """Return the processes that injected failures have already killed, and must not kill again."""
        return {
            (what.iteration, what.kind, target, what.point)
            for what in self._all(events.Struck)
            for target in what.targets
        }

    def last(self) -> events.Iterate | None:
        return next(reversed(self._all(events.Iterate)), None)

    def iterations(self) -> int:
        return 0 if (last := self.last()) is None else last.iteration + 1

    def saves(self) -> int:
        return len(self._all(events.Chosen))

    def failures(self) -> int:
        return len(self._all(events.Lost))

    def _all(self, kind: type[Kind]) -> list[Kind]:
        recorded = (event.what for event in recall(self._path, kind.__name__.lower()))
        return [what for what in recorded if isinstance(what, kind)]
