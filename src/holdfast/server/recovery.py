"""Recovery of a served run: who does what once members are lost, until nobody else is lost meanwhile.

Blocks of lost nodes go to those that are left, or to new ones where none is, which load them from the running
checkpoint. Parts of the input of lost workers go to other workers. Everything here can be broken off by the next loss
and begun anew: nodes are told what they are to hold, and get what they lack.
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
    """Where the run stands: the iteration and round it is in, and the number of the round that restored blocks wait for."""

    iteration: int
    round: int
    version: int


class Recovering:
    """The partition map and who has which part of the input, kept right whoever is lost."""

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
        self.apart: dict[int, float] = {}  # by node, how far its blocks were from their save when it was last known
        self.failures = 0

    @property
    def parts(self) -> dict[int, tuple[int, ...]]:
        """The parts of the input by the worker that has them: its own, and in turn those that nobody has."""
        there = sorted(self._members.workers)
        everything = range(self._settings.workers)
        of = {worker: [part for part in everything if part == worker] for worker in there}
        for part in everything:
            if part not in of:
                of[min(there, key=lambda worker: (len(of[worker]), worker))].append(part)
        return {worker: tuple(sorted(parts)) for worker, parts in of.items()}

    def recover(self, lost: Mapping[Member, str], place: RoundPlace) -> bool:
        """Go on without these members; returns whether blocks were lost, so that the round must be done again."""
        nodes_lost = False
        while lost:
            for member, why in lost.items():
                self.take_leave(member, why, place)
            nodes_lost |= any(member.kind == "node" for member in lost)
            self.require("worker")
            lost = self._rehome({m.number: why for m, why in lost.items() if m.kind == "node"}, place)
            lost = {**lost, **self._members.look()} or self.route()
        return nodes_lost

    def route(self) -> dict[Member, str]:
        """Tell all workers of the map; returns those that are lost."""
        self._members.announce(self.map.version)
        told = {worker: (self.map, dict(self._members.nodes)) for worker in self._members.workers}
        return self._members.lost("worker", self._members.ask("worker", "route", told).missing)

    def join(self, node: int, place: RoundPlace) -> dict[Member, str]:
        """Let a new node take over its share of blocks from the others, as they are; returns who is lost meanwhile."""
        before = self.map
        self.map = before.with_node(node, self._rng())
        given = before.split(self.map.held_by(node))
        answers = self._members.ask("node", "give", {donor: (self.map.version, ids) for donor, ids in given.items()})
        adopted = self._members.ask("node", "adopt", {node: (self.map.version, *answers.results.values())})
        self._record(events.Joined(place.iteration, "node", node, self.map.version))
        if missing := {
            **answers.missing,
            **adopted.missing,
        }:  # nothing has moved: the others still have all that is left
            self.map = PartitionMap(self.map.version, before.owners, self.map.nodes)
            return self._members.lost("node", missing)
        for donor, ids in given.items():
            self._record(events.Moved(place.iteration, donor, node, self.map.version, ids.tolist()))
        return self.hold_by_map(place) or self.route()

    def hold_by_map(self, place: RoundPlace) -> dict[Member, str]:
        """Let every node drop what the map does not give it, and load what it lacks; returns who is lost."""
        return self._hold(place, everything=False)

    def finish_moves(self, held: Mapping[int, Ids], place: RoundPlace, told: Collection[tuple[int, int]]) -> bool:
        """Whether two nodes have a block, because the controller died while one gave it to the other: then it has moved.

        `told` are the pairs of nodes of which the lost controller could still tell.
        """
        doubled = False
        for donor, ids in sorted(held.items()):
            away = ids[self.map.owners[ids] != donor]
            doubled |= bool(len(away))
            for target, moved in self.map.split(away).items():
                if (donor, target) not in told:
                    what = events.Moved(place.iteration, donor, target, self.map.version, moved.tolist())
                    self._record(what)
        return doubled

    def require(self, kind: str) -> None:
        """See to it that there is at least one member of a kind: if all are lost, as many as at first are started."""
        there, count = (
            (self._members.nodes, self._settings.nodes)
            if kind == "node"
            else (self._members.workers, self._settings.workers)
        )
        if not there and not self._reinforce(kind, count, NEW_WITHIN):
            raise WorkerLost(f"all {kind}s are lost, and no new one started within {NEW_WITHIN:g} s")

    def take_leave(self, member: Member, why: str, place: RoundPlace, *, holding: bool = True) -> None:
        """Tell of a loss, and see to it that the lost member takes no part any more."""
        self.failures += 1
        blocks = self.map.held_by(member.number).tolist() if holding and member.kind == "node" else []
        version = place.version if blocks else 0
        self._record(events.Lost(place.iteration, place.round, *member, why, blocks, version))
        self._members.expel(member)

    def _rehome(self, lost: Mapping[int, str], place: RoundPlace) -> dict[Member, str]:
        """Find a new home for the blocks of lost nodes; returns who is lost in doing so."""
        if not any(node in self.map.nodes for node in lost):
            return {}
        self._coordinator.settle(lost)
        if not self._coordinator.exists:
            raise BadInput(
                f"node {', '.join(map(str, lost))} is lost, and there is no checkpoint yet from which its blocks could "
                "come back: start the run anew"
            )
        everything = self._settings.recovery == "full" and bool(np.isin(self.map.owners, list(lost)).any())
        if self._members.nodes:
            gone = [node for node in self.map.nodes if node not in self._members.nodes]
            self.map = self.map.without(gone, self._rng())
        else:
            self._found_anew()
        self._strike("recovery")
        return self._hold(place, everything=everything, lost=lost)

    def _found_anew(self) -> None:
        """All nodes are lost: new ones take over everything."""
        self.require("node")
        seed = self._settings.seed
        self.map = first_map(len(self.map.owners), sorted(self._members.nodes), seed, self.map.version + 1)

    def _hold(self, place: RoundPlace, *, everything: bool, lost: Mapping[int, str] | None = None) -> dict[Member, str]:
        """Tell all nodes what they hold by the new map, and let them load what they lack."""
        began, version = time.perf_counter(), self.map.version
        said, missing = self._said()
        if missing:
            return missing
        told = {}
        for node in self.map.nodes:
            ids = self.map.held_by(node)
            told[node] = (version, ids, place.version, self._coordinator.holding(ids), everything, said)
        answers = self._members.ask("node", "hold", told)
        seconds, size = time.perf_counter() - began, self._size(lost or {}, everything)
        if said is not None and any((held.saved_at == 0).any() for held in answers.results.values()):
            size = None  # how far fresh values are from lost ones nobody knows
        for node, held in sorted(answers.results.items()):
            if len(held.ids):
                ids, saved_at = held.ids.tolist(), held.saved_at.tolist()
                self._record(events.Restored(*place[:2], node, version, ids, saved_at, seconds, size))
                self.apart[node] = 0.0 if everything else self.apart.get(node, 0.0)
        for node in lost or {}:
            self.apart.pop(node, None)
        return self._members.lost("node", answers.missing)

    def _said(self) -> tuple[Arrays | None, dict[Member, str]]:
        """What survivors say of themselves, for blocks that were never saved, and who is lost; None where it is not asked."""
        if self._settings.recovery != "fresh" or self._coordinator.saved_at.all():
            return None, {}
        answers = self._members.ask("node", "survivors", dict.fromkeys(self._members.nodes, ()))
        told = [said for _, said in sorted(answers.results.items()) if said is not None]
        return added(told) if told else None, self._members.lost("node", answers.missing)

    def _size(self, lost: Mapping[int, str], everything: bool) -> float | None:
        """How far what comes back had moved since it was saved; None if that is not known of all of it."""
        nodes = self.apart if everything else lost
        known = [self.apart[node] for node in nodes if node in self.apart]
        return float(np.sqrt(np.sum(np.square(known)))) if len(known) == len(nodes) else None

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng((self._settings.seed, self.map.version + 1))


def first_map(count: int, nodes: list[int], seed: int, version: int = 0) -> PartitionMap:
    """Who holds which block at the start."""
    drawn = PartitionMap.random(count, nodes, np.random.default_rng((seed, 0)))
    return PartitionMap(version, drawn.owners, drawn.nodes)


def gathered_map(count: int, held: Mapping[int, Ids], version: int, missing: int) -> tuple[PartitionMap, bool]:
    """The map that nodes themselves tell, in which `missing` has the blocks that nobody holds; whether there are any."""
    owners = np.full(count, missing, np.int32)
    for node in sorted(held):
        owners[held[node]] = node
    homeless = bool((owners == missing).any())
    return PartitionMap(version, owners, tuple(sorted({*held, *([missing] if homeless else [])}))), homeless
