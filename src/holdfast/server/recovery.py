"""Recovery of a run on the parameter server, after nodes or workers are lost.

Other nodes load the blocks of lost nodes from the running checkpoint, and other workers take over their input parts.
Any step can be repeated if another member is lost meanwhile.
"""

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from holdfast import events
from holdfast.blocks.division import Ids
from holdfast.blocks.partition_map import PartitionMap
from holdfast.errors import BadInput, WorkerLost
from holdfast.server.checkpointing import CheckpointCoordinator, Record
from holdfast.server.members import Member, ServerMembers
from holdfast.server.settings import Settings
from holdfast.workloads.reinit import added
from holdfast.workloads.workload import Arrays

NEW_WITHIN = 60.0  # seconds for new members to start


class RoundPlace(NamedTuple):
    """The current iteration and round (update of the model); `version` counts rounds from the start of the run."""

    iteration: int
    round: int
    version: int


class ServerRecovery:
    """The assignment of blocks to nodes and of training data to workers, repaired when a node or worker is lost."""

    def __init__(
        self,
        settings: Settings,
        members: ServerMembers,
        coordinator: CheckpointCoordinator,
        record: Record,
        reinforce: Callable[[str, int, float], bool],
        strike: Callable[[str], None],
    ) -> None:
        self._settings, self._members, self._coordinator = settings, members, coordinator
        self._record, self._reinforce, self._strike = record, reinforce, strike
        self.map: PartitionMap
        self.distances: dict[int, float] = {}  # by node: how far its blocks had moved since their saves
        self.failures = 0

    @property
    def parts(self) -> dict[int, tuple[int, ...]]:
        """The parts of the training data by worker: the worker's own part, and a fair share of lost workers' parts."""
        there = sorted(self._members.workers)
        everything = range(self._settings.workers)
        of = {worker: [part for part in everything if part == worker] for worker in there}
        for part in everything:
            if part not in of:
                of[min(there, key=lambda worker: (len(of[worker]), worker))].append(part)
        return {worker: tuple(sorted(parts)) for worker, parts in of.items()}

    def recover(self, lost: Mapping[Member, str], place: RoundPlace) -> bool:
        """Remove `lost` nodes and workers and reassign their work; return True if the round must be repeated."""
        nodes_lost = False
        while lost:
            for member, why in lost.items():
                self.remove(member, why, place)
            nodes_lost |= any(member.kind == "node" for member in lost)
            self.require("worker")
            lost = self._reassign({m.number: why for m, why in lost.items() if m.kind == "node"}, place)
            lost = {**lost, **self._members.look()} or self.route()
        return nodes_lost

    def route(self) -> dict[Member, str]:
        """Tell all workers which node holds which blocks; return nodes and workers found lost, with the reasons."""
        self._members.announce(self.map.version)
        arguments = {worker: (self.map, dict(self._members.nodes)) for worker in self._members.workers}
        return self._members.lost("worker", self._members.ask("worker", "route", arguments).missing)

    def join(self, node: int, place: RoundPlace) -> dict[Member, str]:
        """Move an equal share of the blocks to the new `node`; return nodes and workers lost during the move."""
        before = self.map
        self.map = before.with_node(node, np.random.default_rng((self._settings.seed, before.version + 1)))
        given = before.split(self.map.held_by(node))
        answers = self._members.ask("node", "give", {donor: (self.map.version, ids) for donor, ids in given.items()})
        adopted = self._members.ask("node", "adopt", {node: (self.map.version, *answers.results.values())})
        self._record(events.Joined(place.iteration, "node", node, self.map.version))
        if missing := {**answers.missing, **adopted.missing}:  # no block has moved yet
            self.map = PartitionMap(self.map.version, before.owners, self.map.nodes)
            return self._members.lost("node", missing)
        for donor, ids in given.items():
            self._record(events.Moved(place.iteration, donor, node, self.map.version, ids.tolist()))
        return self.hold_by_map(place) or self.route()

    def complete_moves(self, held: Mapping[int, Ids], place: RoundPlace, recorded: Collection[tuple[int, int]]) -> bool:
        """Record moves of blocks that a lost controller did not record; return True if a block is on two nodes.

        `held` has the blocks that each node holds, and `recorded` the recorded moves as (source, target)."""
        doubled = False
        for donor, ids in sorted(held.items()):
            moved_away = ids[self.map.owners[ids] != donor]
            doubled |= bool(len(moved_away))
            for target, moved in self.map.split(moved_away).items():
                if (donor, target) not in recorded:
                    self._record(events.Moved(place.iteration, donor, target, self.map.version, moved.tolist()))
        return doubled

    def require(self, kind: str) -> None:
        """Ensure that a node or worker (`kind`) exists; if all are lost, request as many as at the start."""
        there, count = self._members.workers, self._settings.workers
        if kind == "node":
            there, count = self._members.nodes, self._settings.nodes
        if not there and not self._reinforce(kind, count, NEW_WITHIN):
            raise WorkerLost(f"All {kind}s are lost, and no new {kind} started within {NEW_WITHIN:g} s.")

    def remove(self, member: Member, why: str, place: RoundPlace, *, holding: bool = True) -> None:
        """Record that `member` (and its blocks, if `holding`) was lost in round `place`, and kill its process."""
        self.failures += 1
        blocks = self.map.held_by(member.number).tolist() if holding and member.kind == "node" else []
        version = place.version if blocks else 0
        self._record(events.Lost(place.iteration, place.round, *member, why, blocks, version))
        self._members.expel(member)

    def _reassign(self, lost: Mapping[int, str], place: RoundPlace) -> dict[Member, str]:
        if not any(node in self.map.nodes for node in lost):
            return {}
        self._coordinator.settle(lost)
        if not self._coordinator.exists:
            raise BadInput(
                f"node {', '.join(map(str, lost))} is lost before the first checkpoint, so its blocks cannot "
                "be restored. Start a new run."
            )
        everything = self._settings.recovery == "full" and bool(np.isin(self.map.owners, list(lost)).any())
        if self._members.nodes:
            gone = [node for node in self.map.nodes if node not in self._members.nodes]
            self.map = self.map.without(gone, np.random.default_rng((self._settings.seed, self.map.version + 1)))
        else:  # all nodes are lost, so new ones take over all blocks
            self.require("node")
            nodes, version = sorted(self._members.nodes), self.map.version + 1
            self.map = first_map(len(self.map.owners), nodes, self._settings.seed, version)
        self._strike("recovery")
        return self.hold_by_map(place, everything=everything, lost=lost)

    def hold_by_map(
        self, place: RoundPlace, *, everything: bool = False, lost: Mapping[int, str] | None = None
    ) -> dict[Member, str]:
        """Make each node hold exactly the blocks assigned to it; return nodes and workers lost meanwhile, with reasons.

        With `everything`, nodes load all their blocks again. `lost` has the nodes lost before, with reasons."""
        began, version = time.perf_counter(), self.map.version
        summaries, missing = self._survivor_summaries()
        if missing:
            return missing
        arguments = {}
        for node in self.map.nodes:
            ids = self.map.held_by(node)
            arguments[node] = (version, ids, place.version, self._coordinator.holding(ids), everything, summaries)
        answers = self._members.ask("node", "hold", arguments)
        seconds, size = time.perf_counter() - began, self._size(lost or {}, everything)
        if summaries is not None and any(0 in held.values() for held in answers.results.values()):
            size = None  # the distance of new values from lost ones is unknown
        for node, held in sorted(answers.results.items()):
            if held:
                saves = list(held), list(held.values())
                self._record(events.Restored(*place[:2], node, version, *saves, seconds, size))
                self.distances[node] = 0.0 if everything else self.distances.get(node, 0.0)
        for node in lost or {}:
            self.distances.pop(node, None)
        return self._members.lost("node", answers.missing)

    def _survivor_summaries(self) -> tuple[Arrays | None, dict[Member, str]]:
        if self._settings.recovery != "fresh" or self._coordinator.saved_at.all():
            return None, {}
        answers = self._members.ask("node", "survivors", dict.fromkeys(self._members.nodes, ()))
        summaries = [summary for _, summary in sorted(answers.results.items()) if summary is not None]
        return added(summaries) if summaries else None, self._members.lost("node", answers.missing)

    def _size(self, lost: Mapping[int, str], everything: bool) -> float | None:
        nodes = self.distances if everything else lost
        known = [self.distances[node] for node in nodes if node in self.distances]
        return float(np.sqrt(np.sum(np.square(known)))) if len(known) == len(nodes) else None


def first_map(count: int, nodes: list[int], seed: int, version: int = 0) -> PartitionMap:
    """Return a random assignment of `count` blocks to `nodes`, as a partition map with the number `version`."""
    drawn = PartitionMap.random(count, nodes, np.random.default_rng((seed, 0)))
    return PartitionMap(version, drawn.owners, drawn.nodes)


def gathered_map(count: int, held: Mapping[int, Ids], version: int, lost_node: int) -> tuple[PartitionMap, bool]:
    """Assign each of `count` blocks to the node that holds it in `held`; other blocks go to the lost node `lost_node`.

    Return the assignment, numbered `version`, and True if there are blocks that no node holds."""
    owners = np.full(count, lost_node, np.int32)
    for node in sorted(held):
        owners[held[node]] = node
    homeless = bool((owners == lost_node).any())
    return PartitionMap(version, owners, tuple(sorted({*held, *([lost_node] if homeless else [])}))), homeless
