"""Bounded staleness: parts of the input advance on their own, and none is too far ahead of the slowest.

Nodes apply what is pushed as it comes. What a part pushed before is known by the number of its round, block by block,
so here too a push counts once; what was pushed for blocks that are lost is a part of the perturbation.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.server.calls import Member, call, gather
from holdfast.server.members import PATIENCE, ServerMembers
from holdfast.server.worker import WorkerRound


class StaleIteration(NamedTuple):
    """An iteration that every part of the input has done, with what was measured of each when it had."""

    iteration: int
    turns: dict[int, WorkerRound]


class Stale:
    """How many iterations each part of the input has done, and who is at work on the next."""

    def __init__(self, members: ServerMembers, clocks: dict[int, int], staleness: int) -> None:
        self.clocks, self._members, self._staleness = clocks, members, staleness
        self._running: dict[int, tuple[int, Any]] = {}  # by part: the worker, and its call
        self._turns: dict[int, dict[int, WorkerRound]] = {}
        self._told = min(clocks.values())

    def advance(
        self,
        parts: Callable[[], Mapping[int, tuple[int, ...]]],
        recover: Callable[[Mapping[Member, str]], object],
        until: int,
    ) -> StaleIteration:
        """Go on until one more iteration was done by all parts; none begins iteration `until`."""
        while True:
            if self._turns.get(self._told, {}).keys() == self.clocks.keys():
                self._told += 1
                return StaleIteration(self._told - 1, self._turns.pop(self._told - 1))
            self._begin(parts(), until)
            lost = self._look()
            if lost:
                recover(lost)

    def _begin(self, parts: Mapping[int, tuple[int, ...]], until: int) -> None:
        """Let every part that waits begin its next iteration, unless it would be too far ahead."""
        slowest = min(self.clocks.values())
        for worker, mine in parts.items():
            for part in mine:
                clock = self.clocks[part]
                if part not in self._running and clock < until and clock - slowest <= self._staleness:
                    actor = self._members.workers[worker]
                    self._running[part] = worker, call(actor, "advance", clock, part)

    def _look(self) -> dict[Member, str]:
        """Wait until something has come of a part; returns who is found to be lost."""
        answers = gather({part: ref for part, (_, ref) in self._running.items()}, self._given_up, PATIENCE, first=True)
        lost: dict[Member, str] = {}
        for part, turn in answers.results.items():
            del self._running[part]
            if turn.broken is None:
                self._turns.setdefault(self.clocks[part], {})[part] = turn
                self.clocks[part] += 1
            else:
                lost |= {Member("node", n): why for n, why in turn.broken.items() if n in self._members.nodes}
        for part, why in answers.missing.items():
            worker, _ = self._running.pop(part)
            if worker in self._members.workers:
                lost[Member("worker", worker)] = why
        return lost | self._members.look()

    def _given_up(self) -> dict[int, str]:
        suspects = self._members.look()
        return {
            part: suspects[Member("worker", worker)]
            for part, (worker, _) in self._running.items()
            if Member("worker", worker) in suspects
        }
