"""The blocks that one node holds: their values, last saved values, round numbers, and pushes not applied yet.

Every request may be repeated. Rounds are numbered from the start of the run. The version of a block is the number of
the next round to apply to it, so a repeated round is ignored. The set of blocks changes only together with the
partition map, and requests that use an older map are refused with `BlocksMoved`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Ids
from holdfast.blocks.own_policy import is_file
from holdfast.blocks.policy import BlockInfo
from holdfast.workloads.block_layout import BlockLayout, Layouts, merged, put, require_fit, summed, take
from holdfast.workloads.divided import DividedWorkload, Push, RoundId
from holdfast.workloads.workload import Arrays

MEASURED = ("priority", "relative", "threshold")  # policies that look at how far blocks have moved


class BlocksMoved(Exception):
    """An exception of a node that lacks the requested blocks, or knows a newer block assignment than the caller."""


class HeldBlocks(NamedTuple):
    """Some blocks of a node: values, last saves, and for each block the number of the next update round."""

    ids: Ids
    values: Arrays
    versions: Ids
    saved: Arrays
    saved_at: Ids
    seen: dict[int, Ids]  # with staleness, by worker: the next round that each block accepts


def restored(ids: Ids, values: Arrays, saved_at: Ids, version: int) -> HeldBlocks:
    """Return blocks loaded from a save; `version` is the number of the next update round for these blocks."""
    copies = {name: array.copy() for name, array in values.items()}
    return HeldBlocks(ids, values, np.full(len(ids), version), copies, saved_at, {})


class Shard:
    """The blocks of the model that one node holds."""

    def __init__(self, workload: DividedWorkload) -> None:
        self._workload = workload
        self._blocks = workload.blocks
        self._layouts = Layouts(self._blocks)
        self._layout = self._layouts.of(np.zeros(0, np.int64))
        self._values: Arrays = {}
        self._summary: Arrays | None = None  # of the current values, once a worker has requested it
        self._cache: Arrays = {}
        self._versions = self._saved_at = self._since = np.zeros(0, np.int64)
        self.changed = -1  # the version of the map with which the holdings last changed
        self._seen: dict[int, Ids] = {}
        # By round and worker, a push that waits for the commit, and the version of the map by which it was sent.
        self._inbox: dict[int, dict[int, tuple[Push, int]]] = {}

    @property
    def ids(self) -> Ids:
        return self._layout.ids

    @property
    def versions(self) -> Ids:
        return self._versions.copy()

    @property
    def saved_at(self) -> Ids:
        return self._saved_at.copy()

    def number(self, when: RoundId) -> int:
        """Return the number of the update round `when`, counted from the start of the run."""
        return when.iteration * self._workload.rounds + when.round

    def pull(self, ids: Ids) -> Arrays:
        return take(self._values, self._layout.places(self._found(ids)))

    def summary(self) -> Arrays:
        if self._summary is None:
            self._summary = self._workload.summary(self.ids, self._values)
        return self._summary

    def push(self, when: RoundId, worker: int, push: Push, map_version: int) -> Ids:
        """Buffer a worker's update until the end of round `when`; return the ids of the blocks that it will change."""
        waits = self._versions[self._expected(push, map_version)] <= self.number(when)
        kept = self._inbox.get(self.number(when), {}).get(worker)
        if waits.any() and (kept is None or kept[1] < map_version):
            self._inbox.setdefault(self.number(when), {})[worker] = push, map_version
        return np.asarray(push.ids[waits])

    def waiting(self, when: RoundId) -> tuple[int, ...]:
        return tuple(self._inbox.get(self.number(when), {}))

    def commit(self, when: RoundId, workers: Sequence[int], map_version: int) -> Ids:
        """Apply the updates that `workers` pushed for round `when`; return the ids of the changed blocks."""
        self._require_recent(map_version)
        number = self.number(when)
        due = self._versions == number
        waiting = self._inbox.get(number, {})
        self._apply(when, due, [waiting[worker][0] for worker in workers if worker in waiting])
        self._versions[due] = number + 1
        self._inbox = {later: pushes for later, pushes in self._inbox.items() if later > number}
        return np.asarray(self.ids[due])

    def apply(self, when: RoundId, worker: int, push: Push, map_version: int) -> Ids:
        """Apply a worker's update to the blocks that do not have it yet; return the ids of these blocks."""
        position = self._expected(push, map_version)
        seen = self._seen.setdefault(worker, self._versions.copy())
        due = np.zeros(len(seen), bool)
        due[position] = seen[position] <= self.number(when)
        self._apply(when, due, [push])
        seen[due] = self.number(when) + 1
        return np.asarray(self.ids[due])

    def adopt(self, holding: HeldBlocks, map_version: int) -> None:
        """Add the blocks `holding` to this node, as assigned by version `map_version` of the table of block owners.

        A block that the node has received with this version or a newer version is not replaced."""
        self._require_recent(map_version)
        position = self._layout.positions(holding.ids)
        news = (position < 0) | (self._since[position] < map_version) if len(self.ids) else np.ones(len(position), bool)
        if not news.any():
            return
        arriving = _part(self._blocks, holding, news)
        stays = ~np.isin(self.ids, arriving.ids)
        self._hold(_part(self._blocks, self._holding(), stays), self._since[stays], arriving, map_version)

    def give(self, ids: Ids, map_version: int | None = None) -> HeldBlocks:
        """Return a copy of the blocks `ids`, with their last saved values and the number of the next update round.

        To move blocks to another node, pass the new `map_version`: requests with an older version are then refused."""
        if map_version is not None:
            self._require_recent(map_version)
            self.changed = map_version
        here = np.isin(self.ids, self.ids[self._found(ids)])
        return _part(self._blocks, self._holding(), here)

    def drop(self, ids: Ids, map_version: int) -> None:
        self._require_recent(map_version)
        stays = ~np.isin(self.ids, ids)
        if not stays.all():
            nothing = _part(self._blocks, self._holding(), np.zeros(len(stays), bool))
            self._hold(_part(self._blocks, self._holding(), stays), self._since[stays], nothing, map_version)

    def distances(self, others: Arrays | None = None) -> Floats:
        """Return how far each block is from its value in `others`, by default from its last saved value."""
        if not len(self.ids):
            return np.zeros(0)
        return self._workload.norm(self._layout.blocks, self._values, self._cache if others is None else others)

    def block_info(self, ranking: str) -> BlockInfo:
        """Return the properties of this node's blocks that the policy `ranking` needs; all other properties are 0."""
        nothing = np.zeros(len(self.ids))
        distances = self.distances() if is_file(ranking) or ranking in MEASURED else nothing
        zeros = {name: np.zeros_like(array) for name, array in self._values.items()}
        norms = self.distances(zeros) if is_file(ranking) or ranking == "relative" else nothing
        return BlockInfo(distances, norms, self.saved_at, self._layout.blocks.sizes)

    def mark_saved(self, ids: Ids, iteration: int) -> Arrays:
        """Remember the current values of the blocks `ids` as saved after `iteration`, and return these values."""
        found = self._found(ids)
        new = found[self._saved_at[found] < iteration]
        places = self._layout.places(new)
        values = take(self._values, places)
        put(self._cache, places, values)
        self._saved_at[new] = iteration
        return values if len(new) == len(found) else take(self._cache, self._layout.places(found))

    def _apply(self, when: RoundId, due: np.ndarray, pushes: list[Push]) -> None:
        pushed = np.zeros(len(due), bool)
        for push in pushes:
            position = self._layout.positions(push.ids)
            pushed[position[position >= 0]] = True
        target = np.flatnonzero(pushed & due)
        if not len(target):
            return
        self._summary = None
        ids, places = self.ids[target], self._layout.places(target)
        whole = len(target) == len(self.ids)
        held = self._values if whole else take(self._values, places)
        self._workload.apply(when, ids, held, summed(self._layouts, ids, pushes))
        if not whole:
            put(self._values, places, held)

    def _holding(self) -> HeldBlocks:
        return HeldBlocks(self.ids, self._values, self._versions, self._cache, self._saved_at, self._seen)

    def _hold(self, stays: HeldBlocks, since: Ids, arriving: HeldBlocks, map_version: int) -> None:
        self._layouts, self._summary = Layouts(self._blocks), None
        ids = np.concatenate((stays.ids, arriving.ids))
        order = np.argsort(ids)
        self._layout = layout = self._layouts.of(ids[order])
        places = [layout.places(layout.positions(part.ids)) for part in (stays, arriving)]
        self._values = merged(layout, list(zip(places, (stays.values, arriving.values), strict=True)))
        self._cache = merged(layout, list(zip(places, (stays.saved, arriving.saved), strict=True)))
        self._versions = np.concatenate((stays.versions, arriving.versions))[order]
        self._saved_at = np.concatenate((stays.saved_at, arriving.saved_at))[order]
        self._since = np.concatenate((since, np.full(len(arriving.ids), map_version)))[order]
        self._seen = {
            worker: np.concatenate([part.seen.get(worker, part.versions) for part in (stays, arriving)])[order]
            for worker in {**stays.seen, **arriving.seen}
        }
        self.changed = map_version
        self._inbox = {
            number: {worker: waiting for worker, waiting in pushes.items() if waiting[1] >= map_version}
            for number, pushes in self._inbox.items()
        }

    def _expected(self, push: Push, map_version: int) -> Ids:
        self._require_recent(map_version)
        position = self._found(push.ids)
        require_fit(self._layouts.of(push.ids), push.values)
        return position

    def _found(self, ids: Ids) -> Ids:
        position = self._layout.positions(ids)
        if (position < 0).any():
            missing = int(ids[position < 0][0])
            others = f"which holds {len(self.ids)} others"
            raise BlocksMoved(f"block {missing} is not on this node, {others}: use the newest map")
        return position

    def _require_recent(self, map_version: int) -> None:
        if map_version < self.changed:
            newer = f"this node's blocks, of version {self.changed}"
            raise BlocksMoved(f"the map of version {map_version} is older than {newer}")


def _part(blocks: Blocks, holding: HeldBlocks, wanted: np.ndarray) -> HeldBlocks:
    places = BlockLayout(blocks, holding.ids).places(np.flatnonzero(wanted))
    return HeldBlocks(
        holding.ids[wanted],
        take(holding.values, places),
        holding.versions[wanted],
        take(holding.saved, places),
        holding.saved_at[wanted],
        {worker: seen[wanted] for worker, seen in holding.seen.items()},
    )
