"""The controller of a run: an actor that drives rounds, checkpoints and recovery.

It can be killed at any time. A standby controller then takes over, and recovers the state of the run from the nodes
(blocks and rounds), the store (saves) and the history (failures injected so far).
"""

import os
import queue
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from holdfast import events
from holdfast.faults.schedule import Failure
from holdfast.history.log import HistoryWriter
from holdfast.sampler.digest import Samples
from holdfast.server.checkpointing import CheckpointCoordinator, NodesLost, SelectedBlocks
from holdfast.server.members import Member, ServerMembers
from holdfast.server.recovery import ServerRecovery, first_map, gathered_map
from holdfast.server.rounds import PhaseTimes, StaleRounds, SynchronousRounds
from holdfast.server.server_node import NodeAccount
from holdfast.server.settings import Settings
from holdfast.server.status import ServerOutcome, Status
from holdfast.server.takeover import ControllerPast
from holdfast.workloads.divided import RoundId


class Controller:
    """The Ray actor that directs the nodes and workers of a training run until the run ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workload = settings.load()
        self._count = len(self._workload.blocks)
        self._members = ServerMembers(settings.lost_after)
        self._arrivals: queue.Queue[tuple[Member, ActorHandle[Any]]] = queue.Queue()
        self._status = Status()
        self._requests = 0
        self._clocks = dict.fromkeys(range(settings.workers), 0)
        self._chosen = -1  # the last save for which nodes had chosen blocks when the previous controller was lost

    def train(
        self, nodes: "Mapping[int, ActorHandle[Any]]", workers: "Mapping[int, ActorHandle[Any]]", life: int
    ) -> ServerOutcome:
        """Train until the loss converges or the run ends; `life` is the number of controllers that were lost before."""
        # Until a controller trains, another controller may have the history and the store open.
        settings, members, record = self._settings, self._members, self._record
        self._history = HistoryWriter(settings.history, "controller")
        self._past = ControllerPast(self._history.path, settings)
        self._struck = self._past.strikes()
        self._coordinator = CheckpointCoordinator(settings, self._workload, members, record)
        self._recovery = ServerRecovery(settings, members, self._coordinator, record, self._reinforce, self._strike_at)
        self._rounds = SynchronousRounds(settings, self._workload, members, self._recovery, record, self._strike_at)
        gone = self._past.lost()
        for kind, actors in (("node", nodes), ("worker", workers)):
            for number, actor in actors.items():
                if (member := Member(kind, number)) not in gone:
                    members.admit(member, actor)
        self._record(settings.announced(life, self._workload))
        iteration = self._begin() if life == 0 else self._resume()
        outcome = self._iterate(iteration)
        saved = self._coordinator.settle()
        if saved is not None and saved.lost:  # no later call would notice nodes that were lost in the last save
            self._rounds.recover(members.lost("node", saved.lost))
        self._record(events.Done(life, outcome.iterations))
        for kind, there in (("node", members.nodes), ("worker", members.workers)):
            members.ask(kind, "close", dict.fromkeys(there, ()), 10.0)
        self._coordinator.close()
        self._history.close()
        return outcome

    @ray.method(concurrency_group="watch")
    def status(self) -> Status:
        return self._status

    @ray.method(concurrency_group="watch")
    def welcome(self, kind: str, number: int, actor: "ActorHandle[Any]") -> None:
        """Register a new node or worker, which joins before the next iteration, or at once if recovery needs it."""
        self._arrivals.put((Member(kind, number), actor))

    def _begin(self, version: int = 0) -> int:
        recovery, members = self._recovery, self._members
        while True:
            recovery.require("node")
            recovery.map = first_map(self._count, sorted(members.nodes), self._settings.seed, version)
            lost = members.lost("node", self._deal())
            if not any(member.kind == "node" for member in lost):
                break
            for member, why in lost.items():
                recovery.remove(member, why, self._rounds.place, holding=False)
            version += 1
        self._rounds.recover(lost or recovery.route())
        return 0

    def _deal(self) -> Mapping[int, str]:
        partition, nodes = self._recovery.map, sorted(self._members.nodes)
        begun = {node: (partition.held_by(node), partition.version) for node in nodes}
        if missing := self._members.ask("node", "begin", begun).missing:
            return missing
        if missing := self._members.ask("node", "keep", {node: (ids,) for node, (ids, _) in begun.items()}).missing:
            return missing
        self._coordinator.write(0, 0)
        saved = self._coordinator.settle()
        return {} if saved is None else saved.lost

    def _resume(self) -> int:
        members, recovery = self._members, self._recovery
        answers = members.ask("node", "account", dict.fromkeys(members.nodes, ()))
        accounts: dict[int, NodeAccount] = answers.results
        joined = self._past.joined()
        for node in [number for number, account in accounts.items() if not len(account.ids)]:
            if (member := Member("node", node)) not in joined:  # its joining was not recorded: it joins again
                del accounts[node]
                if (actor := members.dismiss(member)) is not None:
                    self._arrivals.put((member, actor))
        newest = max((account.changed for account in accounts.values()), default=0)
        held = {node: account.ids for node, account in accounts.items()}
        lost = members.lost("node", answers.missing)
        nobody = next((m.number for m in lost if m.kind == "node"), max(held, default=-1) + 1)
        recovery.map, homeless = gathered_map(self._count, held, newest + 1, nobody)
        if not self._coordinator.exists:
            return self._begin(newest + 1)
        versions = np.concatenate([account.versions for account in accounts.values()] or [np.zeros(0, np.int64)])
        open_round = int(versions.min()) if len(versions) else self._past.iterations() * self._workload.rounds
        if self._settings.staleness:
            # Parts that were ahead repeat their iterations: nodes ignore the pushes, but the measures are needed.
            self._clocks = dict.fromkeys(self._clocks, self._past.iterations())
            open_round = self._past.iterations() * self._workload.rounds
        self._rounds.at(open_round)
        self._restore_progress()
        is_doubled = recovery.complete_moves(held, self._rounds.place, self._past.moves())
        # The lost controller may have committed the newest save in the store without a record.
        saved_at = self._coordinator.saved_at
        blocks = np.flatnonzero(saved_at == saved_at.max()).tolist()
        self._record(events.Commit(0, int(saved_at.max()), 0, found=True, blocks=blocks))
        last = max(accounts.values(), key=lambda account: account.chosen, default=None)
        self._coordinator.credit = last.credit if last else self._coordinator.credit
        self._chosen = last.chosen if last else -1
        lost = ({Member("node", nobody): "no node holds these blocks"} if homeless else {}) | lost
        for member in lost:
            members.expel(member)
        if not self._settings.staleness:
            nodes = [member.number for member in lost if member.kind == "node"]
            if len(versions) and versions.max() > open_round:
                self._record_dropped(nodes, self._rounds.when(open_round))
                self._rounds.commit(self._rounds.when(open_round))
            elif open_round > self._past.iterations() * self._workload.rounds:  # others applied the round before
                self._record_dropped(sorted(answers.missing), self._rounds.when(open_round - 1))
        self._save_again(accounts)
        self._rounds.recover(lost)
        if is_doubled:
            self._rounds.recover(recovery.hold_by_map(self._rounds.place))
        self._rounds.recover(recovery.route())
        return 0 if self._settings.staleness else self._finish_iteration(self._chosen)

    def _restore_progress(self) -> None:
        if (last := self._past.last()) is not None:
            self._status = self._status._replace(iteration=last.iteration + 1, loss=last.loss, seconds=last.seconds)
        self._status = self._status._replace(saves=self._past.saves())
        self._recovery.failures = 1 + self._past.failures()
        self._record(events.Lost(*self._rounds.place[:2], "controller", 0, "its process died"))
        for member in sorted({*self._members.all()} - self._past.joined()):
            self._record(events.Joined(self._rounds.place.iteration, *member, self._recovery.map.version))

    def _record_dropped(self, nodes: list[int], when: RoundId) -> None:
        ids = np.concatenate([np.zeros(0, np.int64), *(self._recovery.map.held_by(node) for node in nodes)])
        if len(ids):
            parts = tuple(range(self._settings.workers))
            self._record(events.Dropped(when.iteration, when.round, parts, Samples.of(ids)))

    def _save_again(self, accounts: Mapping[int, NodeAccount]) -> None:
        saved_at = self._coordinator.saved_at
        arguments = {
            n: (a.ids[a.saved_at != saved_at[a.ids]],) for n, a in accounts.items() if n in self._members.nodes
        }
        if any(len(ids) for (ids,) in arguments.values()):
            missing = self._members.ask("node", "keep", arguments).missing
            step = max(account.chosen for account in accounts.values())
            self._coordinator.write(max(step, 0), 0)
            self._coordinator.settle(missing)

    def _finish_iteration(self, chosen: int) -> int:
        iteration, round = divmod(self._rounds.place.version, self._workload.rounds)
        if not round:
            if iteration == self._status.iteration:
                return iteration
            self._end_iteration(iteration - 1, PhaseTimes(), chosen)
            return iteration
        self._train(iteration, range(round, self._workload.rounds), chosen)
        return iteration + 1

    def _iterate(self, iteration: int) -> ServerOutcome:
        criterion, stale = self._workload.criterion, None
        if self._settings.staleness:
            stale = StaleRounds(self._members, self._clocks, self._settings.staleness)
            iteration = min(self._clocks.values())
        while (self._status.loss is None or self._status.loss >= criterion) and iteration < self._settings.iterations:
            self._rounds.at(iteration * self._workload.rounds)
            self._admit_arrivals()
            self._strike_at("boundary")
            if stale:
                self._train_stale(stale)
            else:
                self._train(iteration, range(self._workload.rounds))
            self._members.settle()
            iteration = self._status.iteration
        loss = self._status.loss
        return ServerOutcome(loss is not None and loss < criterion, iteration, float("nan") if loss is None else loss)

    def _train(self, iteration: int, rounds: Iterable[int], chosen: int = -1) -> None:
        times = PhaseTimes()
        for round in rounds:
            self._rounds.train(RoundId(iteration, round, self._settings.seed), times)
        self._end_iteration(iteration, times, chosen)

    def _train_stale(self, stale: StaleRounds) -> None:
        times = PhaseTimes()
        done, turns = stale.advance(lambda: self._recovery.parts, self._rounds.recover, self._settings.iterations)
        times.add(turns.values())
        loss = self._workload.total([turns[part].measures[part] for part in sorted(turns)])
        began = time.perf_counter()
        selected = self._select(done + 1, self._chosen)
        self._record_iteration(done, times, loss, selected, time.perf_counter() - began)

    def _end_iteration(self, iteration: int, times: PhaseTimes, chosen: int) -> None:
        began, version = time.perf_counter(), self._recovery.map.version
        asked = self._rounds.measure({})
        selected = self._select(iteration + 1, chosen)
        took = time.perf_counter() - began
        loss, seconds = self._rounds.measured(asked if self._recovery.map.version == version else None)
        self._record_iteration(iteration, times, loss, selected, max(0.0, took - seconds))

    def _record_iteration(
        self, iteration: int, times: PhaseTimes, loss: float, selected: SelectedBlocks | None, waited: float
    ) -> None:
        began, step = time.perf_counter(), iteration + 1
        self._coordinator.poll()
        if selected is not None:  # nodes write the blocks that they buffered, while training continues
            self._coordinator.write(step, selected.bytes)
            self._strike_at("checkpoint")
            lost = {node: why for node, why in selected.lost.items() if node in self._members.nodes}
            if lost:  # and recovery has not removed them meanwhile
                self._rounds.recover(self._members.lost("node", lost))
        now = time.perf_counter()
        checkpoint = now - began + (waited if selected is not None else 0.0)
        seconds = now - times.began
        parts = times.pull, times.compute, times.push, times.apply
        self._record(events.Iterate(iteration, loss, seconds, *parts, checkpoint))
        saves, failures = self._status.saves + (selected is not None), self._recovery.failures
        self._status = self._status._replace(iteration=step, loss=loss, seconds=seconds, saves=saves, failures=failures)

    def _select(self, step: int, chosen: int) -> SelectedBlocks | None:
        """Let the server nodes choose the blocks to save after iteration `step`; return None if no save is due.

        `chosen` is the last iteration for which blocks were chosen before this controller took over."""
        if not self._settings.policy.due(step) or chosen >= step:
            return None
        self._coordinator.settle()
        began = time.perf_counter()
        while True:
            try:
                selected = self._coordinator.select(step)
                break
            except NodesLost as lost:
                self._rounds.recover(self._members.lost("node", lost.missing))
        self._recovery.distances |= selected.distances
        self._record(events.Chosen(step, selected.blocks, selected.bytes, time.perf_counter() - began))
        return selected

    def _admit_arrivals(self) -> None:
        while not self._arrivals.empty():
            member, actor = self._arrivals.get()
            self._members.admit(member, actor)
            if member.kind == "node":
                self._coordinator.settle()
                self._rounds.recover(self._recovery.join(member.number, self._rounds.place))

    def _reinforce(self, kind: str, count: int, seconds: float) -> bool:
        self._requests += 1
        self._status = self._status._replace(wanted=(kind, count, self._requests))
        deadline = time.monotonic() + seconds
        came = 0
        while came < count and time.monotonic() < deadline:
            try:
                member, actor = self._arrivals.get(timeout=0.05)
            except queue.Empty:
                continue
            self._members.admit(member, actor)
            self._record(events.Joined(self._rounds.place.iteration, *member, self._recovery.map.version + 1))
            came += member.kind == kind
        self._status = self._status._replace(wanted=None)
        return came > 0

    def _strike_at(self, point: str) -> None:
        for failure in self._settings.failures:
            if failure.point != point or failure.step != self._rounds.place.iteration:
                continue
            if not (targets := self._targets(failure)):
                continue
            self._struck |= {(failure.step, failure.kind, target, point) for target in targets}
            if point == "boundary":
                self._coordinator.settle()  # as in the simulator, every save is committed before the failure
                if failure.kind == "node":
                    nodes = dict.fromkeys(self._members.nodes, ())
                    self._recovery.distances |= self._members.ask("node", "distance_from_saves", nodes).results
            self._record(events.Struck(failure.step, failure.kind, targets, point))
            if failure.kind == "controller":
                os.kill(os.getpid(), signal.SIGKILL)
            self._members.kill(failure.kind, targets)

    def _targets(self, failure: Failure) -> tuple[int, ...]:
        """Return the processes that `failure` has to kill, without processes that are lost or were killed by it before."""
        present = {*self._members.all(), Member("controller", 0)}
        return tuple(
            target
            for target in failure.targets
            if Member(failure.kind, target) in present
            and (failure.step, failure.kind, target, failure.point) not in self._struck
        )

    def _record(self, what: events.What) -> None:
        self._history.append(what)
        self._history.flush()
