"""What one node holds: blocks, how many rounds each has seen, their saved values, and what workers push for them.

Everything may be asked twice. A round has a number, counted from the start of the run; the version of a block is the
number of the next round that is to change it, so what a round brings a second time is no longer wanted. Holdings change
only together with the partition map, and whoever still goes by an older map is told so by `Moved`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Ids
from holdfast.blocks.policy import BlockInfo
from holdfast.server.layout import BlockLayout, Layouts, add, join, put, require_fit, room, take
from holdfast.workloads.divided import Divided, Push, When
from holdfast.workloads.workload import Arrays


class BlocksMoved(Exception):
    """This node does not hold these blocks, or holds others than the asker's map says: ask again with a newer map."""


class Holding(NamedTuple):
    """Some blocks, in rising order, with everything that a node has of them."""

    ids: Ids
    values: Arrays
    versions: Ids
    saved: Arrays
    saved_at: Ids
    seen: dict[int, Ids]  # of workers whose pushes are applied as they come: the next round of each that is wanted


class AppliedCommit(NamedTuple):
    """What a commit of a round did to the blocks of a node."""

    ids: Ids  # had this round now, whether or not a worker pushed something for them
    ignored: Ids  # had it before
    behind: Ids  # miss an earlier round, and were left as they are


class _Waiting(NamedTuple):
    """A push of a worker that waits for the commit of its round, and the version of the map it was sent by."""

    push: Push
    under: int


def restored(ids: Ids, values: Arrays, saved_at: Ids, version: int) -> Holding:
    """Blocks as they were saved, to go on with the round of this number; also every block before the first round."""
    copies = {name: array.copy() for name, array in values.items()}
    return Holding(ids, values, np.full(len(ids), version), copies, saved_at, {})


class Shard:
    """The blocks of one node; empty until it adopts some."""

    def __init__(self, workload: Divided) -> None:
        self._workload = workload
        self._blocks = workload.blocks
        self._layouts = Layouts(self._blocks)
        self._layout = self._layouts.of(np.zeros(0, np.int64))
        self._values: Arrays = {}
        self._summary: Arrays | None = None  # of these values, once somebody has asked
        self._cache: Arrays = {}
        self._versions = self._saved_at = self._since = np.zeros(0, np.int64)
        self._changed = -1
        self._seen: dict[int, Ids] = {}
        self._inbox: dict[int, dict[int, _Waiting]] = {}

    @property
    def ids(self) -> Ids:
        """The blocks that are here, in rising order."""
        return self._layout.ids

    @property
    def versions(self) -> Ids:
        """For each block the number of the round that it waits for."""
        return self._versions.copy()

    @property
    def saved_at(self) -> Ids:
        """For each block the iteration of which the cache has its value."""
        return self._saved_at.copy()

    @property
    def sizes(self) -> Ids:
        """How many numbers each block holds, companions not counted."""
        return self._layout.blocks.sizes

    @property
    def changed(self) -> int:
        """The version of the map with which the holdings last changed; requests by an older map are refused."""
        return self._changed

    def number(self, when: When) -> int:
        """The number of a round, counted from the start of the run."""
        return when.iteration * self._workload.rounds + when.round

    def pull(self, ids: Ids) -> Arrays:
        """The present values of some blocks, in rising order, packed."""
        return take(self._values, self._layout.places(self._found(ids)))

    def summary(self) -> Arrays:
        """What the workload says of all blocks that are here; asked by every worker, and computed once."""
        if self._summary is None:
            self._summary = self._workload.summary(self.ids, self._values)
        return self._summary

    def push(self, when: When, worker: int, push: Push, under: int) -> Ids:
        """Keep what a worker pushes until its round is committed; returns the blocks that still wait for that round.

        A worker's push by a newer map takes the place of that by an older one; the same push again changes nothing.
        """
        waits = self._versions[self._expected(push, under)] <= self.number(when)
        kept = self._inbox.get(self.number(when), {}).get(worker)
        if waits.any() and (kept is None or kept.under < under):
            self._inbox.setdefault(self.number(when), {})[worker] = _Waiting(push, under)
        return np.asarray(push.ids[waits])

    def waiting(self, when: When) -> tuple[int, ...]:
        """The workers whose pushes wait for the commit of a round."""
        return tuple(self._inbox.get(self.number(when), {}))

    def commit(self, when: When, workers: Sequence[int], under: int) -> AppliedCommit:
        """Apply the sum of what these workers pushed, added up in their order, to the blocks that wait for this round."""
        self._require_recent(under)
        number = self.number(when)
        due, before = self._versions == number, self._versions > number
        result = AppliedCommit(self.ids[due], self.ids[before], self.ids[~(due | before)])
        waiting = self._inbox.get(number, {})
        self._apply(when, due, [waiting[worker].push for worker in workers if worker in waiting])
        self._versions[due] = number + 1
        self._inbox = {later: pushes for later, pushes in self._inbox.items() if later > number}
        return result

    def apply(self, when: When, worker: int, push: Push, under: int) -> Ids:
        """Apply a worker's push at once, where workers may be ahead of each other; returns the blocks it was applied to.

        A block takes a worker's rounds in rising order and each once: what comes again, or too late, it leaves.
        """
        position = self._expected(push, under)
        seen = self._seen.setdefault(worker, self._versions.copy())
        due = np.zeros(len(seen), bool)
        due[position] = seen[position] <= self.number(when)
        self._apply(when, due, [push])
        seen[due] = self.number(when) + 1
        return np.asarray(self.ids[due])

    def adopt(self, holding: Holding, under: int) -> None:
        """Take over blocks, or new values of blocks that are here, under a new version of the map.

        What was pushed by older maps is forgotten: the round is repeated. Adopting again under the same version changes
        nothing, so that blocks that have moved on since are not set back.
        """
        self._require_recent(under)
        position = self._layout.positions(holding.ids)
        news = (position < 0) | (self._since[position] < under) if len(self.ids) else np.ones(len(position), bool)
        if not news.any():
            return
        arriving = _part(self._blocks, holding, news)
        stays = ~np.isin(self.ids, arriving.ids)
        self._hold(_part(self._blocks, self._holding(), stays), self._since[stays], arriving, under)

    def require_map(self, under: int) -> None:
        """Refuse whoever goes by an older map from now on: what is given away must not change here any more."""
        self._require_recent(under)
        self._changed = under

    def give(self, ids: Ids) -> Holding:
        """A copy of everything that is here of some blocks; once another node has adopted them, `drop` them."""
        here = np.isin(self.ids, self.ids[self._found(ids)])
        return _part(self._blocks, self._holding(), here)

    def drop(self, ids: Ids, under: int) -> None:
        """Let blocks go that belong to another node under a new version of the map; those that are not here are gone."""
        self._require_recent(under)
        stays = ~np.isin(self.ids, ids)
        if not stays.all():
            nothing = _part(self._blocks, self._holding(), np.zeros(len(stays), bool))
            self._hold(_part(self._blocks, self._holding(), stays), self._since[stays], nothing, under)

    def distances(self) -> Floats:
        """How far each block is from its saved value, in the workload's norm."""
        return self._apart_from(self._cache)

    def norms(self) -> Floats:
        """How far each block is from zero, in the workload's norm."""
        return self._apart_from({name: np.zeros_like(array) for name, array in self._values.items()})

    def standing(self, ranking: str) -> BlockInfo:
        """What a policy knows of the blocks that are here; what its ranking does not read is not measured, and 0."""
        nothing = np.zeros(len(self.ids))
        distances = self.distances() if ranking in ("priority", "relative", "threshold") else nothing
        norms = self.norms() if ranking == "relative" else nothing
        return BlockInfo(distances, norms, self.saved_at, self._layout.blocks.sizes)

    def mark_saved(self, ids: Ids, iteration: int) -> Arrays:
        """Make the present values of blocks their saved ones, as of an iteration, and return them packed, to be written.

        Asked again for the same iteration it returns the same values, even if the blocks have moved on.
        """
        found = self._found(ids)
        new = found[self._saved_at[found] < iteration]
        places = self._layout.places(new)
        values = take(self._values, places)
        put(self._cache, places, values)
        self._saved_at[new] = iteration
        return values if len(new) == len(found) else take(self._cache, self._layout.places(found))

    def _apply(self, when: When, due: np.ndarray, pushes: list[Push]) -> None:
        """Change the blocks that are due by the sum of pushes."""
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
        self._workload.apply(when, ids, held, self._sum(ids, pushes))
        if not whole:
            put(self._values, places, held)

    def _sum(self, ids: Ids, pushes: list[Push]) -> Arrays:
        """What was pushed for some blocks, added up in the order of the pushes."""
        layout = self._layouts.of(ids)
        total = room(layout, {name: array for push in pushes for name, array in push.values.items()})
        for push in pushes:
            position = layout.positions(push.ids)
            wanted = position >= 0
            part = push.values if wanted.all() else self._chosen(push, wanted)
            add(total, layout.places(position[wanted]), part)
        return total

    def _chosen(self, push: Push, wanted: np.ndarray) -> Arrays:
        return take(push.values, self._layouts.of(push.ids).places(np.flatnonzero(wanted)))

    def _apart_from(self, others: Arrays) -> Floats:
        if not len(self.ids):
            return np.zeros(0)
        return self._workload.norm(self._layout.blocks, self._values, others)

    def _holding(self) -> Holding:
        return Holding(self.ids, self._values, self._versions, self._cache, self._saved_at, self._seen)

    def _hold(self, stays: Holding, since: Ids, arriving: Holding, under: int) -> None:
        self._layouts, self._summary = Layouts(self._blocks), None
        self._layout, self._values = join(self._layouts, [(stays.ids, stays.values), (arriving.ids, arriving.values)])
        self._cache = join(self._layouts, [(stays.ids, stays.saved), (arriving.ids, arriving.saved)])[1]
        order = np.argsort(np.concatenate((stays.ids, arriving.ids)))
        self._versions = np.concatenate((stays.versions, arriving.versions))[order]
        self._saved_at = np.concatenate((stays.saved_at, arriving.saved_at))[order]
        self._since = np.concatenate((since, np.full(len(arriving.ids), under)))[order]
        self._seen = {
            worker: np.concatenate([part.seen.get(worker, part.versions) for part in (stays, arriving)])[order]
            for worker in {**stays.seen, **arriving.seen}
        }
        self._changed = under
        self._inbox = {
            number: {worker: waiting for worker, waiting in pushes.items() if waiting.under >= under}
            for number, pushes in self._inbox.items()
        }

    def _expected(self, push: Push, under: int) -> Ids:
        """Where the blocks of a push are here, if it can be taken."""
        self._require_recent(under)
        position = self._found(push.ids)
        require_fit(self._layouts.of(push.ids), push.values)
        return position

    def _found(self, ids: Ids) -> Ids:
        position = self._layout.positions(ids)
        if (position < 0).any():
            missing = int(ids[position < 0][0])
            raise BlocksMoved(
                f"block {missing} is not on this node, which holds {len(self.ids)} others: use the newest map"
            )
        return position

    def _require_recent(self, under: int) -> None:
        if under < self._changed:
            raise BlocksMoved(
                f"the map of version {under} is older than this node's blocks, of version {self._changed}"
            )


def _part(blocks: Blocks, holding: Holding, wanted: np.ndarray) -> Holding:
    """Those blocks of a holding that are wanted, copied."""
    places = BlockLayout(blocks, holding.ids).places(np.flatnonzero(wanted))
    return Holding(
        holding.ids[wanted],
        take(holding.values, places),
        holding.versions[wanted],
        take(holding.saved, places),
        holding.saved_at[wanted],
        {worker: seen[wanted] for worker, seen in holding.seen.items()},
    )
