"""What a controller that takes over reads in the history of those before it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from holdfast import events
from holdfast.history.log import recall
from holdfast.server.members import Member
from holdfast.server.settings import Settings

Strike: TypeAlias = tuple[int, str, tuple[int, ...], str]  # the iteration, who, and the point of the iteration


class ControllerPast:
    """The history of the controllers of one run, as it is whenever it is asked."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path, self._settings = path, settings

    def lost(self) -> set[Member]:
        """Nodes and workers that are gone for good."""
        return {Member(what.kind, what.number) for what in self._all("lost") if isinstance(what, events.Lost)}

    def joined(self) -> set[Member]:
        """Who took part from the start, or is told to have joined."""
        told = {Member(what.kind, what.number) for what in self._all("joined") if isinstance(what, events.Joined)}
        nodes = {Member("node", number) for number in range(self._settings.nodes)}
        return told | nodes | {Member("worker", number) for number in range(self._settings.workers)}

    def moves(self) -> set[tuple[int, int]]:
        """Between which nodes blocks were moved."""
        return {(what.source, what.target) for what in self._all("moved") if isinstance(what, events.Moved)}

    def strikes(self) -> set[Strike]:
        """What was struck on purpose: it is not struck again."""
        told = [what for what in self._all("struck") if isinstance(what, events.Struck)]
        return {(what.iteration, what.kind, tuple(what.targets), what.point) for what in told}

    def iterations(self) -> int:
        """How many are done."""
        return max((what.iteration + 1 for what in self._iterations()), default=0)

    def last(self) -> events.Iterate | None:
        """The iteration that was told of last."""
        return next(reversed([*self._iterations()]), None)

    def saves(self) -> int:
        """How often blocks were chosen to be saved."""
        return sum(1 for _ in self._all("chosen"))

    def failures(self) -> int:
        """How often a node, a worker or a controller was lost."""
        return sum(1 for _ in self._all("lost"))

    def _iterations(self) -> Iterator[events.Iterate]:
        return (what for what in self._all("iterate") if isinstance(what, events.Iterate))

    def _all(self, kind: str) -> Iterator[events.What]:
        return (event.what for event in recall(self._path, kind))
