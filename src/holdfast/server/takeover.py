"""The history of a run's earlier controllers, as read by a controller that takes over."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from holdfast import events
from holdfast.history.log import recall
from holdfast.server.members import Member
from holdfast.server.settings import Settings

Strike: TypeAlias = tuple[int, str, tuple[int, ...], str]  # iteration, kind and numbers of the targets, point


class ControllerPast:
    """The events that earlier controllers of a run recorded; every method reads the history file again."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings

    def lost(self) -> set[Member]:
        """Return the members that are recorded as lost."""
        return {Member(what.kind, what.number) for what in self._all("lost") if isinstance(what, events.Lost)}

    def joined(self) -> set[Member]:
        """Return every node and worker that ever took part: the initial ones, and those recorded as joined."""
        joined = {Member(what.kind, what.number) for what in self._all("joined") if isinstance(what, events.Joined)}
        nodes = {Member("node", number) for number in range(self._settings.nodes)}
        return joined | nodes | {Member("worker", number) for number in range(self._settings.workers)}

    def moves(self) -> set[tuple[int, int]]:
        """Return the recorded moves of blocks between nodes, as pairs of source and target node."""
        return {(what.source, what.target) for what in self._all("moved") if isinstance(what, events.Moved)}

    def strikes(self) -> set[Strike]:
        """Return the failures that were already injected and must not be injected again."""
        struck = [what for what in self._all("struck") if isinstance(what, events.Struck)]
        return {(what.iteration, what.kind, tuple(what.targets), what.point) for what in struck}

    def last(self) -> events.Iterate | None:
        return next(reversed([what for what in self._all("iterate") if isinstance(what, events.Iterate)]), None)

    def iterations(self) -> int:
        return 0 if (last := self.last()) is None else last.iteration + 1

    def saves(self) -> int:
        """Return how many saves earlier controllers have begun, by choosing the blocks to save."""
        return sum(1 for _ in self._all("chosen"))

    def failures(self) -> int:
        """Return the number of recorded losses of nodes, workers and controllers."""
        return sum(1 for _ in self._all("lost"))

    def _all(self, kind: str) -> Iterator[events.What]:
        return (event.what for event in recall(self._path, kind))
