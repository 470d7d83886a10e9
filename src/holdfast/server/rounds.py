"""Rounds of a served run: workers compute and push, nodes apply; after the last of an iteration workers measure the loss.

Who is lost meanwhile is gone on without, and what is lacking then is done again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ray import ObjectRef

from holdfast import events
from holdfast.errors import WorkerLost
from holdfast.sampler.digest import Samples
from holdfast.server.calls import Member
from holdfast.server.coordinator import Record
from holdfast.server.members import ServerMembers
from holdfast.server.outcome import Times
from holdfast.server.recovery import Recovering, RoundPlace
from holdfast.server.settings import Settings
from holdfast.server.worker import WorkerRound
from holdfast.workloads.rounds import Divided, When

TRIES = 20  # of a round in which nobody is found to be lost


class Rounds:
    """The rounds of a run one after the other, and the place where it stands among them."""

    def __init__(
        self,
        settings: Settings,
        workload: Divided,
        members: ServerMembers,
        recovering: Recovering,
        record: Record,
        strike: Callable[[str], None],
    ) -> None:
        self._settings, self._workload = settings, workload
        self._members, self._recovering = members, recovering
        self._record, self._strike = record, strike
        self.place = RoundPlace(0, 0, 0)

    def at(self, number: int) -> None:
        """The run stands before the round of this number."""
        self.place = RoundPlace(*divmod(number, self._workload.rounds), number)

    def when(self, number: int) -> When:
        """The round of this number, as members are told of it."""
        return When(*divmod(number, self._workload.rounds), self._settings.seed)

    def recover(self, lost: Mapping[Member, str]) -> bool:
        """Go on without these members; returns whether blocks were lost, so that the round must be done again."""
        return bool(lost) and self._recovering.recover(lost, self.place)

    def train(self, when: When, times: Times) -> None:
        """Let workers compute and push, as often as it takes, then nodes apply."""
        self.at(when.iteration * self._workload.rounds + when.round)
        todo = set(range(self._settings.workers))
        turns: dict[int, WorkerRound] = {}
        for _ in range(TRIES):
            told = {w: (when, mine) for w, parts in self._recovering.parts.items() if (mine := _among(parts, todo))}
            answers = self._members.ask("worker", "compute", told)
            done = {worker: turn for worker, turn in answers.results.items() if turn.broken is None}
            turns |= done
            todo -= {part for worker in done for part in told[worker][1]}
            if not todo:
                times.add(turns.values())
                if when.round == self._workload.rounds - 1:
                    self._strike("apply")
                times.apply += self.commit(when)
                return
            if self.recover(self._found(answers.results, answers.missing)):
                todo = set(range(self._settings.workers))
        raise WorkerLost(
            f"round {when.round} of iteration {when.iteration} was tried {TRIES} times, and nobody is lost"
        )

    def commit(self, when: When) -> float:
        """Let nodes apply a round; what was pushed for blocks of a node that is lost now is not made up for."""
        parts, version = tuple(range(self._settings.workers)), self._recovering.map.version
        answers = self._members.ask("node", "commit", dict.fromkeys(self._members.nodes, (version, when, parts)))
        self.place = RoundPlace(when.iteration, when.round, self.place.version + 1)
        if answers.missing:
            ids = np.concatenate([self._recovering.map.held_by(node) for node in answers.missing])
            self._record(events.Dropped(when.iteration, when.round, parts, Samples.of(ids)))
            self.recover(self._members.lost("node", answers.missing))
        return max(answers.results.values(), default=0.0)

    def measure(self, known: Mapping[int, float]) -> "Mapping[int, ObjectRef[Any]]":
        """Ask workers for the measures of parts that are not known."""
        parts = self._recovering.parts.items()
        told = {w: (todo,) for w, mine in parts if (todo := tuple(p for p in mine if p not in known))}
        return self._members.call("worker", "measure", told)

    def measured(self, asked: "Mapping[int, ObjectRef[Any]] | None") -> tuple[float, float]:
        """The loss, from what all workers measure, and the seconds of the slowest; some may have been asked before."""
        measures: dict[int, float] = {}
        seconds = 0.0
        for _ in range(TRIES):
            answers = self._members.answers("worker", asked if asked is not None else self.measure(measures))
            asked = None
            for turn in answers.results.values():
                measures |= turn.measures
                seconds = max(seconds, turn.compute)
            if len(measures) == self._settings.workers:
                return self._workload.total([measures[part] for part in range(self._settings.workers)]), seconds
            if self.recover(self._found(answers.results, answers.missing)):
                measures = {}
        raise WorkerLost(f"the loss was measured {TRIES} times, and nobody is lost")

    def _found(self, turns: Mapping[int, WorkerRound], missing: Mapping[int, str]) -> dict[Member, str]:
        """Who is lost, by what workers say or because they do not."""
        broken = {n: why for turn in turns.values() for n, why in (turn.broken or {}).items()}
        nodes = {Member("node", n): why for n, why in broken.items() if n in self._members.nodes}
        return nodes | self._members.lost("worker", missing)


def _among(parts: tuple[int, ...], todo: set[int]) -> tuple[int, ...]:
    return tuple(part for part in parts if part in todo)
