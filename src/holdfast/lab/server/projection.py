"""From rates that were measured here to the size of the paper's run: a projection, and the assumptions it rests on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np

from holdfast.blocks.partition_map import PartitionMap
from holdfast.checkpoint.running import write_segments
from holdfast.checkpoint.store import DirectoryStore
from holdfast.lab.server.server_trials import NODES, QUARTERS, WORKERS
from holdfast.server.candidates import Candidates
from holdfast.server.selection import converse, exchange
from holdfast.server.shard import Shard, restored
from holdfast.workloads.divided import Push, When
from holdfast.workloads.lda import LatentDirichletAllocation
from holdfast.workloads.workload import Arrays

TIMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured on this machine, each alone in one process, but for what is said to be from the served runs."""

    sample: float  # seconds a token and topic, of one core
    transfer: float  # bytes a second that a worker pulls and pushes, from the served runs
    tally: float  # seconds a token, to compare the topics of its document now and as saved
    select: float  # seconds a document, to take part in the choice of what is saved
    set_aside: float  # bytes a second that are copied into the cache of the running checkpoint
    write: float  # bytes a second into a store on this disk
    message: float  # seconds of a message to all nodes that asks nothing, there and back
    work: float  # seconds of a checkpoint's work on one node here: distances, its part of the choice, copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    documents: float
    tokens: float
    topics: float
    vocabulary: float
    machines: int
    cores: int  # of a machine, each a worker; its node has one of them
    token: int  # bytes of a token's topic
    messages: int  # of a checkpoint, one after another


PAPER = Size(
    documents=480e3,
    tokens=2e9,
    topics=1e3,
    vocabulary=1e5,
    machines=4,
    cores=8,
    token=2,
    messages=6,  # five questions, as among 10 million blocks in benchmarks/server, and what to save
)
MESSAGES = 2  # of a checkpoint here, where nodes have few blocks: one question, and what to save
ASSUMPTIONS = (
    "8 workers a machine, one for each virtual core of an i3.2xlarge, and one node",
    "cores and disks as fast as this machine's, which other work shares",
    "the sampler looks at all topics of a token, as ours does; a sparse one would make iterations shorter",
    "machines send and receive as fast as processes here do",
    "a vocabulary of 100 thousand words, which the paper does not give, and counts of 4 bytes",
    "topics of 2 bytes a token",
    "a message takes as long as here, and a checkpoint has 6",
)


@dataclass(frozen=True, slots=True)
class Projection:
    """Seconds of an iteration at a size: its parts, what a checkpoint adds, and the write in the background."""

    compute: float
    transfer: float
    checkpoint: float
    write: float

    @property
    def iteration(self) -> float:
        """Seconds of an iteration without a checkpoint."""
        return self.compute + self.transfer

    @property
    def share(self) -> float:
        """What a checkpoint adds, in proportion to the iteration."""
        return self.checkpoint / self.iteration


def project(rates: Rates, size: Size, fraction: float = 0.25) -> Projection:
    """Machines work side by side, so each part takes as long as on one of them."""
    tokens = size.tokens / size.machines
    counts = size.vocabulary * size.topics * 4
    moved = 2 * tokens * size.token + counts * size.machines  # topics there and back, and what every node counted
    saved = fraction * tokens * size.token
    return Projection(
        compute=tokens / size.cores * size.topics * rates.sample,
        transfer=moved / rates.transfer,
        checkpoint=tokens * rates.tally
        + size.documents * rates.select
        + saved / rates.set_aside
        + size.messages * rates.message,
        write=saved / rates.write,
    )


def measure_rates(workload: LatentDirichletAllocation, scratch: Path, transferred: float, message: float) -> Rates:
    """Measure every rate but these: `transferred` bytes a second, from served runs, and the seconds of a `message`."""
    tokens, documents = len(workload.data.words), len(workload.blocks)
    shards = _shards(workload)
    chosen = _chosen(shards, documents)
    distances = [_seconds(shard.distances) for shard in shards]
    selecting = _seconds(lambda: _chosen(shards, documents)) - sum(distances)
    saved = [shard.pull(ids) for shard, ids in zip(shards, chosen, strict=True)]
    size = sum(_bytes(each) for each in saved)
    aside = sum(_marked(shard, ids) for shard, ids in zip(shards, chosen, strict=True))
    work = max(distances) + max(selecting, 0.0) / NODES + aside / NODES
    return Rates(
        sample=_sampled(workload) / workload.topics,
        transfer=transferred,
        tally=sum(distances) / tokens,
        select=max(selecting, 0.0) / documents,
        set_aside=size / aside,
        write=size / _written(workload, chosen, saved, scratch),
        message=message,
        work=work,
    )


def _shards(workload: LatentDirichletAllocation) -> list[Shard]:
    """The blocks on as many nodes as in the served runs, one iteration after they were saved."""
    partition = PartitionMap.random(len(workload.blocks), range(NODES), np.random.default_rng(0))
    before, after, shards = workload.start(0), workload.start(1), []
    for node in range(NODES):
        ids = partition.held_by(node)
        shard = Shard(workload)
        shard.adopt(restored(ids, cast(Arrays, workload.blocks.pack(before, ids)), np.zeros(len(ids), np.int64), 0), 0)
        shard.push(When(0, 0, 0), 0, Push(ids, cast(Arrays, workload.blocks.pack(after, ids))), 0)
        shard.commit(When(0, 0, 0), [0], 0)
        shards.append(shard)
    return shards


def _chosen(shards: list[Shard], count: int) -> list[np.ndarray]:
    """The blocks of every node that are saved, chosen as the server chooses them, all in this process."""
    candidates = [Candidates(QUARTERS, 1, shard.ids, shard.block_info("priority"), count) for shard in shards]
    conversation = exchange(QUARTERS, Fraction(0))
    verdict = converse(conversation, lambda question: [each.answer(question) for each in candidates]).verdict
    return [each.taken(verdict) for each in candidates]


def _marked(shard: Shard, ids: np.ndarray) -> float:
    steps = iter(range(1, 2 * TIMES + 1))
    return _seconds(lambda: shard.mark_saved(ids, next(steps)))


def _sampled(workload: LatentDirichletAllocation) -> float:
    """Seconds a token that a worker samples."""
    part = workload.part(0, WORKERS)
    pulled = cast(Arrays, workload.blocks.pack(workload.start(0), workload.pulls(part, 0)))
    summed = workload.summary(np.arange(len(workload.blocks)), workload.start(0))
    return _seconds(lambda: workload.compute(part, When(0, 0, 0), pulled, summed)) / len(part.words)


def _written(
    workload: LatentDirichletAllocation, chosen: list[np.ndarray], saved: list[Arrays], scratch: Path
) -> float:
    blocks, total = workload.blocks, len(workload.data.words)
    with TemporaryDirectory(dir=scratch) as folder:
        store = DirectoryStore(folder)
        numbers = iter(range(0, 10_000 * TIMES, 100))

        def write() -> None:
            for node, (ids, values) in enumerate(zip(chosen, saved, strict=True)):
                write_segments(store, blocks, f"node-{node}", next(numbers), ids, np.ones(len(ids), int), values, total)

        return _seconds(write)


def _bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _seconds(what: Callable[[], object]) -> float:
    """The least of some times: whatever else the machine does only adds to it."""
    what()  # compiles, and fills caches
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        what()
        taken.append(time.perf_counter() - began)
    return min(taken)
