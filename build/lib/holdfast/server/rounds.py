"""Rounds of a run: workers compute and push, nodes apply; after an iteration's last round workers measure the loss.

With staleness, parts of the input advance independently, and nodes apply each push on arrival. If members are lost, the
round continues without them, and missing work is repeated.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from ray import ObjectRef

from holdfast import events
from holdfast.errors import WorkerLost
from holdfast.sampler.digest import Samples
from holdfast.server.checkpointing import Record
from holdfast.server.members import PATIENCE, Member, ServerMembers, call, gather
from holdfast.server.recovery import RoundPlace, ServerRecovery
from holdfast.server.settings import Settings
from holdfast.server.worker import WorkerRound
from holdfast.workloads.divided import DividedWorkload, RoundId

TRIES = 20  # of a round in which no lost member is found


class PhaseTimes:
    """The seconds that the slowest worker or node spent in each phase of an iteration: pull, compute, push, apply."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.pull = self.compute = self.push = self.apply = 0.0

    def add(self, turns: Iterable[WorkerRound]) -> None:
        turns = list(turns)
        self.pull += max(turn.pull for turn in turns)
        self.compute += max(turn.compute for turn in turns)
        self.push += max(turn.push for turn in turns)


class SynchronousRounds:
    """Synchronous training: all workers must finish a round (one update of the model) before the next one begins."""

    def __init__(
        self,
        settings: Settings,
        workload: DividedWorkload,
        members: ServerMembers,
        recovery: ServerRecovery,
        record: Record,
        strike: Callable[[str], None],
    ) -> None:
        self._settings, self._workload = settings, workload
        self._members, self._recovery = members, recovery
        self._record, self._strike = record, strike
        self.place = RoundPlace(0, 0, 0)

    def at(self, number: int) -> None:
        self.place = RoundPlace(*divmod(number, self._workload.rounds), number)

    def when(self, number: int) -> RoundId:
        """Convert a round number, counted from the start of the run, to an iteration and a round within it."""
        return RoundId(*divmod(number, self._workload.rounds), self._settings.seed)

    def recover(self, lost: Mapping[Member, str]) -> bool:
        return bool(lost) and self._recovery.recover(lost, self.place)

    def train(self, when: RoundId, times: PhaseTimes) -> None:
        """Do one round: workers push their updates, then nodes apply them. Add the seconds of each phase to `times`."""
        self.at(when.iteration * self._workload.rounds + when.round)
        todo = set(range(self._settings.workers))
        turns: dict[int, WorkerRound] = {}
        for _ in range(TRIES):
            arguments = {
                w: (when, own)
                for w, parts in self._recovery.parts.items()
                if (own := tuple(part for part in parts if part in todo))
            }
            answers = self._members.ask("worker", "compute", arguments)
            done = {worker: turn for worker, turn in answers.results.items() if turn.broken is None}
            turns |= done
            todo -= {part for worker in done for part in arguments[worker][1]}
            if not todo:
                times.add(turns.values())
                if when.round == self._workload.rounds - 1:
                    self._strike("apply")
                times.apply += self.commit(when)
                return
            if self.recover(self._found(answers.results, answers.missing)):
                todo = set(range(self._settings.workers))
        tried = f"round {when.round} of iteration {when.iteration} failed {TRIES} times"
        raise WorkerLost(f"{tried}, but no lost member was found.")

    def commit(self, when: RoundId) -> float:
        """Let nodes apply the updates that workers pushed in round `when`; return the seconds of the slowest node."""
        parts, version = tuple(range(self._settings.workers)), self._recovery.map.version
        answers = self._members.ask("node", "commit", dict.fromkeys(self._members.nodes, (version, when, parts)))
        self.place = RoundPlace(when.iteration, when.round, self.place.version + 1)
        if answers.missing:
            ids = np.concatenate([self._recovery.map.held_by(node) for node in answers.missing])
            self._record(events.Dropped(when.iteration, when.round, parts, Samples.of(ids)))
            self.recover(self._members.lost("node", answers.missing))
        return max(answers.results.values(), default=0.0)

    def measure(self, known: Mapping[int, float]) -> "Mapping[int, ObjectRef[Any]]":
        """Let workers compute the loss on all parts of the data that have no loss in `known`; return the Ray calls."""
        parts = self._recovery.parts.items()
        arguments = {w: (todo,) for w, own in parts if (todo := tuple(p for p in own if p not in known))}
        return self._members.call("worker", "measure", arguments)

    def measured(self, asked: "Mapping[int, ObjectRef[Any]] | None") -> tuple[float, float]:
        """Return the loss on all data, and the seconds of the slowest worker.

        `asked` are the calls that `measure` returned; if it is None, the calls are made now."""
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
        raise WorkerLost(f"The loss could not be measured in {TRIES} tries, but no lost member was found.")

    def _found(self, turns: Mapping[int, WorkerRound], missing: Mapping[int, str]) -> dict[Member, str]:
        broken = {n: why for turn in turns.values() for n, why in (turn.broken or {}).items()}
        nodes = {Member("node", n): why for n, why in broken.items() if n in self._members.nodes}
        return nodes | self._members.lost("worker", missing)


class StaleRounds:
    """Asynchronous training: each part of the data may be up to `staleness` iterations ahead of the slowest part."""

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
    ) -> tuple[int, dict[int, WorkerRound]]:
        """Train until every part of the data has finished one more iteration.

        Return the number of this iteration, and the results by part. `parts` returns each worker's parts of the data.
        `recover` is called with lost nodes and workers. No iteration after `until` is begun."""
        while True:
            if self._turns.get(self._told, {}).keys() == self.clocks.keys():
                self._told += 1
                return self._told - 1, self._turns.pop(self._told - 1)
            self._begin(parts(), until)
            if lost := self._look():
                recover(lost)

    def _begin(self, parts: Mapping[int, tuple[int, ...]], until: int) -> None:
        """Start the next iteration on each idle part of the data, unless it is too far ahead, or `until` is reached."""
        slowest = min(self.clocks.values())
        for worker, own in parts.items():
            for part in own:
                clock = self.clocks[part]
                if part not in self._running and clock < until and clock - slowest <= self._staleness:
                    actor = self._members.workers[worker]
                    self._running[part] = worker, call(actor, "advance", clock, part)

    def _look(self) -> dict[Member, str]:
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
        members = {part: Member("worker", worker) for part, (worker, _) in self._running.items()}
        return {part: suspects[member] for part, member in members.items() if member in suspects}
