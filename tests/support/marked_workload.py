"""A workload whose blocks show what was pushed for them: which round of which worker, and how often."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from holdfast.blocks.division import Blocks, Floats, Ids, Norm, along, euclidean, ragged, whole
from holdfast.server.shard import Shard, restored
from holdfast.workloads.block_layout import BlockLayout, merged, take
from holdfast.workloads.divided import Push, RoundId
from holdfast.workloads.workload import Arrays, Clock, Stack

WORKERS, ROUNDS, ITERATIONS = 3, 2, 3
COLUMNS = WORKERS * ROUNDS * ITERATIONS
NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Marks:
    """Rows, two whole arrays and documents of unequal length; a push marks the column of its round and its worker.

    So a block shows which pushes it has had, and how often; a companion of the rows counts how often it was changed.
    """

    name: str = "marks"
    criterion: float = 0.0
    stochastic: bool = False
    steady: bool = True
    lanes: int = 1
    rounds: int = ROUNDS
    norm: Norm = field(default=euclidean, repr=False)

    @cached_property
    def blocks(self) -> Blocks:
        state = self.start()
        rows, layers = along(state, "rows", companions=["changes"]), whole(state, ["layer", "bias"])
        return rows + layers + ragged(state, "words", [0, 2, 2, 5, 6])

    def start(self, stream: int = 0) -> Arrays:
        marks = {"rows": 5, "words": 6, "layer": 2, "bias": 1}
        return {name: np.zeros((n, COLUMNS)) for name, n in marks.items()} | {"changes": np.zeros(5)}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        raise NotImplementedError

    def loss(self, stack: Stack) -> Floats:
        raise NotImplementedError

    def part(self, worker: int, workers: int) -> Any:
        return worker

    def pulls(self, part: Any, round: int) -> Ids:
        return np.arange(len(self.blocks))

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        return {"marks": np.array([sum(array.sum() for array in held.values())])}

    def compute(self, part: Any, when: RoundId, pulled: Arrays, summed: Arrays) -> Push:
        marked = self.start()
        del marked["changes"]
        for array in marked.values():
            array[:, (when.iteration * ROUNDS + when.round) * WORKERS + part] = 1
        return Push(self.pulls(part, when.round), marked)

    def apply(self, when: RoundId, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        for name, marks in pushed.items():
            held[name] += marks
        if "changes" in held:
            held["changes"] += 1

    def measure(self, part: Any, pulled: Arrays, summed: Arrays) -> float:
        return 0.0

    def total(self, measures: Sequence[float]) -> float:
        return 0.0


WORKLOAD = Marks()
COUNT = len(WORKLOAD.blocks)
EVERY = np.arange(COUNT)
FULL = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]  # all blocks but the document without words


def a_shard(ids: Sequence[int] | Ids = EVERY) -> Shard:
    """A node before the first round, under the map of version 0."""
    shard, chosen = Shard(WORKLOAD), np.array(ids, np.int64)
    shard.adopt(restored(chosen, packed(WORKLOAD.start(), chosen), np.zeros(len(chosen), np.int64), 0), 0)
    return shard


def packed(state: Arrays, ids: Ids) -> Arrays:
    return {name: np.asarray(array) for name, array in WORKLOAD.blocks.pack(state, ids).items()}


def push_of(worker: int, when: RoundId, ids: Ids = EVERY) -> Push:
    """What a worker pushes for some blocks."""
    return _push_of(worker, when, tuple(ids.tolist()))


@cache
def _push_of(worker: int, when: RoundId, chosen: tuple[int, ...]) -> Push:
    ids = np.array(chosen, np.int64)
    everything = WORKLOAD.compute(worker, when, {}, {})
    layout = BlockLayout(WORKLOAD.blocks, everything.ids)
    return Push(ids, take(everything.values, layout.places(layout.positions(ids))))


def when_is(number: int) -> RoundId:
    return RoundId(*divmod(number, ROUNDS), stream=0)


def marks_of(shards: Sequence[Shard]) -> np.ndarray:
    """Which pushes each block has had: a row for each block of `FULL`; within a block all rows agree."""
    ids = np.concatenate([shard.ids for shard in shards])
    assert len(ids) == COUNT
    assert set(ids) == set(EVERY)
    layout = BlockLayout(WORKLOAD.blocks, np.sort(ids))
    values = merged(layout, [(layout.places(layout.positions(s.ids)), s.pull(s.ids)) for s in shards])
    words = values["words"]
    assert (words[[0, 2, 2]] == words[[1, 3, 4]]).all()
    assert (values["layer"][0] == values["layer"][1]).all()
    return np.concatenate([values["rows"], values["layer"][:1], values["bias"], words[[0, 2, 5]]])


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
