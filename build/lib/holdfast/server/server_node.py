"""A node of the parameter server: an actor that holds blocks, with its own history and a thread that writes saves.

The controller decides which blocks the node holds, when a round is committed and what is saved. Blocks to save are
chosen and copied in another thread that changes no block, so workers can pull meanwhile.
"""

import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import ray

from holdfast import events
from holdfast.blocks.division import Ids
from holdfast.blocks.own_policy import is_file
from holdfast.blocks.policy import BlockInfo
from holdfast.checkpoint.running import Segment, block_bytes, load_blocks, write_segments
from holdfast.history.log import HistoryWriter
from holdfast.sampler.digest import Samples
from holdfast.server.failure_detector import raylet_lives
from holdfast.server.selection import Candidates, SaveUpTo
from holdfast.server.settings import Settings
from holdfast.server.shard import MEASURED, BlocksMoved, HeldBlocks, Shard, restored
from holdfast.workloads.block_layout import BlockLayout, put
from holdfast.workloads.divided import Push, RoundId
from holdfast.workloads.reinit import rule_of
from holdfast.workloads.workload import Arrays

THREADS = {"health": 1, "disk": 1, "choose": 1}
"""The number of threads in each of a node's Ray concurrency groups; methods outside these groups share one thread."""
Method = TypeVar("Method")


class BufferedSave(NamedTuple):
    """The blocks that a node copied for a save, their size, and how much its other blocks changed since their saves."""

    blocks: Samples
    bytes: int
    distance: float | None  # None if the policy does not look at distances


class NodeAccount(NamedTuple):
    """A node's report to a new controller: its blocks, their next rounds of updates, and its saves."""

    ids: Ids
    versions: Ids
    saved_at: Ids
    changed: int
    credit: Fraction
    chosen: int  # the last iteration after which blocks were chosen to be saved


def _exclusive(method: Method) -> Method:
    """Decorate a method of `ServerNode` to hold the node's lock, so that such methods run one at a time.

    Put `ray.method` below this decorator: Ray looks for a method's options on the innermost function."""
    called = cast(Callable[..., Any], method)

    @functools.wraps(called)
    def alone(node: "ServerNode", *args: Any, **options: Any) -> Any:
        with node.turn:
            return called(node, *args, **options)

    return cast(Method, alone)


class ServerNode:
    """A Ray actor of the parameter server: it holds blocks of the model, applies workers' updates, and saves blocks."""

    def __init__(self, number: int, settings: Settings) -> None:
        self._number, self._settings = number, settings
        self.turn = threading.Lock()
        self._workload = settings.load()
        self._store = settings.open()
        self._shard = Shard(self._workload)
        self._history = HistoryWriter(settings.history, f"node-{number}")
        self._received: Counter[int] = Counter()
        self._candidates: tuple[int, BlockInfo, Candidates] | None = None
        self._to_write: tuple[Ids, Ids, Arrays] | None = None  # blocks, the iterations of their saves, and the values
        self._total = 0
        self._credit, self._chosen = Fraction(0), -1

    def ready(self) -> int:
        self._history.flush()
        return os.getpid()

    @_exclusive
    def begin(self, ids: Ids, map_version: int) -> None:
        """Initialize the blocks `ids` and hold only these; `map_version` is the version of the block assignment."""
        values = cast(Arrays, self._workload.blocks.pack(self._start(), ids))
        self._shard.adopt(restored(ids, values, np.zeros(len(ids), np.int64), 0), map_version)
        self._shard.drop(np.setdiff1d(self._shard.ids, ids, assume_unique=True), map_version)

    def pull(self, map_version: int, ids: Ids) -> tuple[Arrays, Arrays]:
        """Return the values of the blocks `ids`, and the summary that the workload makes of all blocks on this node."""
        if map_version < self._shard.changed:
            raise BlocksMoved(f"the map of version {map_version} is older than node {self._number}'s blocks")
        return self._shard.pull(ids) if len(ids) else {}, self._shard.summary()

    def push(self, map_version: int, when: RoundId, part: int, push: Push) -> int:
        """Buffer an update from part `part` of the data until round `when` ends; return how many blocks will change."""
        waiting = len(self._shard.push(when, part, push, map_version))
        self._received[self._shard.number(when)] += 1
        return waiting

    @_exclusive
    def commit(self, map_version: int, when: RoundId, parts: Sequence[int]) -> float:
        """Apply the updates for round `when` that came from `parts` of the data; return the seconds that this took."""
        began = time.perf_counter()
        pushed = self._shard.waiting(when)
        applied = self._shard.commit(when, parts, map_version)
        if len(applied):
            counted = tuple(part for part in parts if part in pushed)
            again = self._received.pop(self._shard.number(when), 0) - len(counted)
            blocks = Samples.of(applied)
            self._record(events.Applied(when.iteration, when.round, map_version, blocks, counted, again))
        return time.perf_counter() - began

    @_exclusive
    def apply(self, map_version: int, when: RoundId, part: int, push: Push) -> int:
        """Apply an update for round `when` from part `part` of the data at once.

        Return the number of changed blocks."""
        changed = self._shard.apply(when, part, push, map_version)
        if len(changed):
            blocks = Samples.of(changed)
            self._record(events.Applied(when.iteration, when.round, map_version, blocks, (part,)))
        return len(changed)

    @_exclusive
    @ray.method(concurrency_group="choose")
    def answer(self, step: int, *question: Any) -> Any:
        if self._candidates is None or self._candidates[0] != step:
            count, policy = len(self._workload.blocks), self._settings.policy.at(step)
            info = self._shard.block_info(policy.ranking)
            self._candidates = step, info, Candidates(policy, step, self._shard.ids, info, count)
        return self._candidates[2].answer(*question)

    @_exclusive
    @ray.method(concurrency_group="choose")
    def save(self, step: int, verdict: SaveUpTo, credit: Fraction) -> BufferedSave:
        """Copy the blocks that `verdict` selects after iteration `step` to a buffer; `credit` is the unused budget."""
        began = time.perf_counter()
        assert self._candidates is not None
        _, info, candidates = self._candidates
        ids = candidates.taken(verdict)
        self._candidates, self._credit, self._chosen = None, credit, step
        left = ~np.isin(self._shard.ids, ids)
        ranking = self._settings.policy.at(step).ranking
        known = is_file(ranking) or ranking in MEASURED or not left.any()
        distance = float(np.sqrt(np.sum(info.distances[left] ** 2))) if known else None
        values = self._shard.mark_saved(ids, step)
        self._to_write = ids, np.full(len(ids), step), values
        kept = BufferedSave(Samples.of(ids), sum(array.nbytes for array in values.values()), distance)
        self._record(events.Chosen(step, kept.blocks, kept.bytes, time.perf_counter() - began))
        return kept

    @_exclusive
    def keep(self, ids: Ids) -> None:
        """Copy the last saved values of the blocks `ids` to the buffer for `write`, because the store may lack them."""
        given = self._shard.give(ids)
        self._to_write = given.ids, given.saved_at, given.saved

    @ray.method(concurrency_group="disk")
    def write(self, sequence: int) -> list[Segment]:
        """Write the buffered blocks to the store, as this node's part of save `sequence`; return the new files."""
        if self._to_write is None or not len(self._to_write[0]):
            return []
        if not self._total:
            self._start()
        blocks, who = self._workload.blocks, f"node-{self._number}"
        return write_segments(self._store, blocks, who, sequence, *self._to_write, self._total)

    def survivors(self) -> Arrays | None:
        ids = self._shard.ids
        return rule_of(self._workload).survivors(ids, self._shard.pull(ids)) if len(ids) else None

    @_exclusive
    def hold(
        self,
        map_version: int,
        ids: Ids,
        version: int,
        segments: Sequence[Segment],
        everything: bool,
        summaries: Arrays | None = None,
    ) -> dict[int, int]:
        """Make this node hold exactly the blocks `ids`; return, for each block it loads, the iteration of the save.

        Missing blocks (all if `everything`) are loaded from `segments`, the files of saved blocks. `version` is the
        next update round. With `summaries` of surviving blocks, blocks that were never saved get new values."""
        began = time.perf_counter()
        lacking = ids if everything else np.setdiff1d(ids, self._shard.ids, assume_unique=True)
        saved_at = np.zeros(0, np.int64)
        self._candidates = None
        if len(lacking):
            values = cast(Arrays, load_blocks(self._store, self._workload.blocks, segments, lacking))
            all_saved_at = np.zeros(len(self._workload.blocks), np.int64)
            for segment in segments:  # the last segment that has a block is its newest save
                all_saved_at[segment.ids] = segment.saved_at
            saved_at = all_saved_at[lacking]
            holding = restored(lacking, values, saved_at, version)
            if summaries is not None and len(unsaved := np.flatnonzero(saved_at == 0)):
                self._renew(holding, unsaved, summaries)
            self._shard.adopt(holding, map_version)
            place, blocks = divmod(version, self._workload.rounds), lacking.tolist()
            seconds = time.perf_counter() - began
            self._record(events.Restored(*place, self._number, map_version, blocks, saved_at.tolist(), seconds))
        self._shard.drop(np.setdiff1d(self._shard.ids, ids, assume_unique=True), map_version)
        return dict(zip(lacking.tolist(), saved_at.tolist(), strict=True))

    @_exclusive
    def give(self, map_version: int, ids: Ids) -> HeldBlocks:
        return self._shard.give(ids, map_version)

    @_exclusive
    def adopt(self, map_version: int, *holdings: HeldBlocks) -> None:
        self._candidates = None
        for holding in holdings:
            self._shard.adopt(holding, map_version)

    @_exclusive
    def distance_from_saves(self) -> float:
        return float(np.sqrt(np.sum(self._shard.distances() ** 2)))

    @_exclusive
    def account(self) -> NodeAccount:
        shard = self._shard
        return NodeAccount(shard.ids, shard.versions, shard.saved_at, shard.changed, self._credit, self._chosen)

    def close(self) -> None:
        self._history.close()

    @ray.method(concurrency_group="health")
    def beat(self, newest: int) -> bool:
        return raylet_lives()

    @ray.method(concurrency_group="health")
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, what: events.What) -> None:
        self._history.append(what)
        self._history.flush()

    def _renew(self, holding: HeldBlocks, unsaved: Ids, summaries: Arrays) -> None:
        iteration = int(holding.versions[0]) // self._workload.rounds
        fresh = rule_of(self._workload).fresh(holding.ids[unsaved], summaries, iteration, self._settings.seed)
        layout = BlockLayout(self._workload.blocks, holding.ids)
        put(holding.values, layout.places(unsaved), fresh)

    def _start(self) -> Arrays:
        state = self._workload.start(self._settings.seed)
        self._total = int(block_bytes(self._workload.blocks, state).sum())
        return state
