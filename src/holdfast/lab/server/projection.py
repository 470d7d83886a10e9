"""Project rates measured on this machine to a run of the paper's size, under the assumptions listed here."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
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
from holdfast.workloads.divided import Push, RoundId
from holdfast.workloads.lda import LatentDirichletAllocation
from holdfast.workloads.workload import Arrays

TIMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The measured speeds of this machine, such as seconds per token and bytes per second."""

    sample: float  # seconds per token and topic on one core
    transfer: float  # bytes per second between a worker and the server
    tally: float  # seconds per token to compare its topic with the saved one
    select: float  # seconds per document to choose what is saved
    set_aside: float  # bytes per second, to copy blocks in memory for a checkpoint
    write: float  # bytes per second, to a store on disk
    message: float  # seconds of a round trip to all nodes
    work: float  # seconds of a node's fixed work in a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a training run: data, model and machines.

    `token` is bytes per token, `messages` is per checkpoint."""

    documents: float
    tokens: float
    topics: float
    vocabulary: float
    machines: int
    cores: int  # each with a worker; the server node shares one of them
    token: int
    messages: int  # sent one after another


PAPER = Size(
    documents=480e3,
    tokens=2e9,
    topics=1e3,
    vocabulary=1e5,
    machines=4,
    cores=8,
    token=2,
    messages=6,  # five questions, as among 10 million blocks in benchmarks/server, and the blocks to save
)
MESSAGES = 2  # per checkpoint here, where nodes have few blocks: one question, and the blocks to save
ASSUMPTIONS = (
    "8 workers per machine, one for each virtual core of an i3.2xlarge, and one node",
    "cores and disks as fast as this machine's, which other work shares",
    "the sampler considers all topics of a token, as ours does; a sparse one would make iterations shorter",
    "machines send and receive as fast as processes do here",
    "a vocabulary of 100 thousand words, which the paper does not give, and counts of 4 bytes",
    "topics of 2 bytes per token",
    "a message takes as long as here, and a checkpoint has 6",
)


@dataclass(frozen=True, slots=True)
class Projection:
    """The projected seconds of an iteration (`compute` and `transfer`), its checkpoint, and the write to disk."""

    compute: float
    transfer: float
    checkpoint: float
    write: float

    @property
    def iteration(self) -> float:
        return self.compute + self.transfer

    @property
    def share(self) -> float:
        return self.checkpoint / self.iteration


def project(rates: Rates, size: Size, fraction: float = 0.25) -> Projection:
    """Return the projected times of a run of the given `size`, if each checkpoint saves `fraction` of the state."""
    tokens = size.tokens / size.machines  # machines work in parallel
    counts = size.vocabulary * size.topics * 4
    moved = 2 * tokens * size.token + counts * size.machines  # topics both ways, and the counts of every node
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
    """Measure how fast this machine computes, selects and saves the blocks of `workload`, in the folder `scratch`.

    `transferred` (bytes per second) and `message` (seconds of a round trip) describe the network, and are not measured."""
    tokens, documents = len(workload.data.words), len(workload.blocks)
    shards = _shards(workload)
    chosen = _chosen(shards, documents)
    distances = [_seconds(shard.distances) for shard in shards]
    selecting = _seconds(lambda: _chosen(shards, documents)) - sum(distances)
    saved = [shard.pull(ids) for shard, ids in zip(shards, chosen, strict=True)]
    size = sum(array.nbytes for arrays in saved for array in arrays.values())
    steps, aside = count(1), 0.0
    for shard, ids in zip(shards, chosen, strict=True):
        aside += _seconds(lambda shard=shard, ids=ids: shard.mark_saved(ids, next(steps)))  # type: ignore[misc]
    part = workload.part(0, WORKERS)
    pulled = cast(Arrays, workload.blocks.pack(workload.start(0), workload.pulls(part, 0)))
    summed = workload.summary(np.arange(documents), workload.start(0))
    sampled = _seconds(lambda: workload.compute(part, RoundId(0, 0, 0), pulled, summed)) / len(part.words)
    work = max(distances) + max(selecting, 0.0) / NODES + aside / NODES
    return Rates(
        sample=sampled / workload.topics,
        transfer=transferred,
        tally=sum(distances) / tokens,
        select=max(selecting, 0.0) / documents,
        set_aside=size / aside,
        write=size / _written(workload, chosen, saved, scratch),
        message=message,
        work=work,
    )


def _shards(workload: LatentDirichletAllocation) -> list[Shard]:
    """Return the server shards of a run on `NODES` nodes, one iteration after all blocks were saved."""
    partition = PartitionMap.random(len(workload.blocks), range(NODES), np.random.default_rng(0))
    before, after, shards = workload.start(0), workload.start(1), []
    for node in range(NODES):
        ids = partition.held_by(node)
        shard = Shard(workload)
        shard.adopt(restored(ids, cast(Arrays, workload.blocks.pack(before, ids)), np.zeros(len(ids), np.int64), 0), 0)
        shard.push(RoundId(0, 0, 0), 0, Push(ids, cast(Arrays, workload.blocks.pack(after, ids))), 0)
        shard.commit(RoundId(0, 0, 0), [0], 0)
        shards.append(shard)
    return shards


def _chosen(shards: list[Shard], blocks: int) -> list[np.ndarray]:
    candidates = [Candidates(QUARTERS, 1, shard.ids, shard.block_info("priority"), blocks) for shard in shards]
    conversation = exchange(QUARTERS, Fraction(0))
    verdict = converse(conversation, lambda question: [candidate.answer(question) for candidate in candidates]).verdict
    return [candidate.taken(verdict) for candidate in candidates]


def _written(
    workload: LatentDirichletAllocation, chosen: list[np.ndarray], saved: list[Arrays], scratch: Path
) -> float:
    blocks, total = workload.blocks, len(workload.data.words)
    with TemporaryDirectory(dir=scratch) as folder:
        store = DirectoryStore(folder)
        numbers = count(0, 100)

        def write() -> None:
            for node, (ids, values) in enumerate(zip(chosen, saved, strict=True)):
                write_segments(store, blocks, f"node-{node}", next(numbers), ids, np.ones(len(ids), int), values, total)

        return _seconds(write)


def _seconds(action: Callable[[], object]) -> float:
    """Run `action` several times and return the shortest duration in seconds."""
    action()  # compiles, and fills caches
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return min(taken)
