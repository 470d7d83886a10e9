"""Save the state of a run: every rank writes its part of the tensors, and rank 0 commits the snapshot.

A rank votes for the commit when its file and its history up to the step are on disk. The vote also carries values that
differ by rank, such as the states of the rank's random generators. Rank 0 commits when it has the votes of all ranks.
Training never waits for a vote. If a rank is lost before it has voted, the snapshot is never committed.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from holdfast import progress
from holdfast.checkpoint import sharding, snapshot
from holdfast.checkpoint.digest import Digest
from holdfast.checkpoint.sharding import ShardedTensor
from holdfast.checkpoint.writer import Ballot, Saved, Writer, WrittenShard
from holdfast.distributed.ranks import NEVER, Ranks, RanksChanged
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON, Commit, Save
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import Position
from holdfast.sampler.run_plan import RunPlan
from holdfast.stall import Stall
from holdfast.train.state import rng
from holdfast.train.state.attempt import AttemptContext
from holdfast.train.state.protected import Protected
from holdfast.train.state.shards import DividedState
from holdfast.train.state.state_digests import snapshot_digest, tree_digest

logger = logging.getLogger(__name__)
STATE = "state"  # everything of the protected objects but their tensors
CONFIG = "config"  # the sample plan
CONDITIONS = "conditions"
GENERATORS = "generators"  # digests of the states of the random generators, one entry per rank
OWN = "own"  # plain values that belong to one rank, one entry per rank
POSITIONS = "positions"  # the position of each rank's loader, if loaders feed the run
TENSOR_PARALLEL = "tensor_parallel"  # the number of ranks that trained the same samples, if several did
STOPPED = "stopped"  # the script stopped the run at this step
SHARDED = "sharded"  # tensors of the state are distributed over the ranks, so no rank had all of it


@dataclass(frozen=True, slots=True)
class Conditions:
    """Facts that a resumed run compares with its snapshot: digests of a few samples, and the threads per worker.

    `data` is the digest for the first phase (training loop). `later_data` has the digests for later phases. Groups of
    `tensor_parallel` ranks train the same samples."""

    data: str | None
    threads: int
    later_data: tuple[str | None, ...] = ()
    tensor_parallel: int = 1

    @classmethod
    def now(cls, data: Sequence[str | None], tensor_parallel: int) -> "Conditions":
        """Return the conditions of this process.

        `data` has a digest of a few samples for each phase (training loop)."""
        return cls(data[0], torch.get_num_threads(), tuple(data[1:]), tensor_parallel)

    @property
    def all_data(self) -> tuple[str | None, ...]:
        return (self.data, *self.later_data)

    def to_json(self) -> dict[str, JSON]:
        later: dict[str, JSON] = {"later_data": list(self.later_data)} if self.later_data else {}
        groups: dict[str, JSON] = {TENSOR_PARALLEL: self.tensor_parallel} if self.tensor_parallel > 1 else {}
        return {"data": self.data, "threads": self.threads, **later, **groups}

    def check(self, saved: Mapping[str, JSON], *, same_shares: bool, warns: bool) -> None:
        """Raise BadInput if the dataset has changed since a snapshot, whose conditions are `saved`.

        If `warns` and `same_shares` are True, log a warning if the number of threads per worker has changed."""
        later, threads = saved.get("later_data"), saved.get("threads")
        data = [saved.get("data"), *(later if isinstance(later, list) else ())]
        pairs = zip(self.all_data, data, strict=False)  # a run may be extended by a phase
        if any(mine is not None and theirs is not None and mine != theirs for mine, theirs in pairs):
            raise BadInput(
                "the dataset holds other samples than when this run was saved. A split or shuffle before attach() "
                "without a seed does that: give the run the same samples, or name another --out."
            )
        if warns and same_shares and isinstance(threads, int) and threads != self.threads:
            logger.warning(
                "this run was trained with %d threads per worker and resumes with %d: sums may round differently, so the "
                "result may differ in its last bits from a run that never stopped. Set OMP_NUM_THREADS=%d to avoid that.",
                threads,
                self.threads,
                threads,
            )


class Saves(Protocol):
    """The interface of an object that saves the state of a run when a save is due."""

    def prepare(self) -> None:
        """Allocate memory for saves. Call this once the state has its final size."""

    @property
    def next(self) -> int:
        """The step before which the next save is due."""

    @property
    def is_under_way(self) -> bool:
        """True while a save is being written, or is written but not yet recorded in the history."""

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        """Save the state before `step`, at position `at` in the data; return the seconds that training waited.

        `stops` is True if the run stops after this save, and is recorded in the snapshot."""

    def hurry(self) -> None:
        """Write everything from now on without a limit of the bandwidth, because the run ends. Thread-safe."""

    def regroup(self, settled: int | None) -> None:
        """Adapt to changed ranks. Skip a save before step `settled`, which some ranks may already be training."""

    def collect(self) -> None:
        """Record in the history the saves that were completed since the last call; raise an error if a save failed."""

    def close(self) -> None:
        """Wait until every save is on disk, and record these saves in the history."""


class NoSaver:
    """The saver of a run without a folder: it saves nothing."""

    next, is_under_way = NEVER, False

    def prepare(self) -> None:
        pass

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        return 0.0

    def hurry(self) -> None:
        pass

    def regroup(self, settled: int | None) -> None:
        pass

    def collect(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True, kw_only=True, eq=False)
class CheckpointSaver:
    """The part of one rank in saving checkpoints: it writes its part of the state, and rank 0 commits the snapshot.

    If a worker is lost, the ranks change. A save for which not all of the old ranks have voted is then abandoned.

    `position` returns the data loader's position. `injected` is called with the step of each save, to inject failures.
    `saved` is the newest step that is saved or being saved."""

    config: RunConfig
    attempt: AttemptContext
    ranks: Ranks
    writer: Writer
    protected: Protected
    replicated: Sequence[nn.Module]  # the models that have the same parameters on every rank
    plan: RunPlan
    fingerprint: str  # identifies the plan and the protected objects
    conditions: Conditions
    position: Callable[[], tuple[int, str] | None]  # of the loader that feeds this rank, if there is one
    injected: Callable[[int], None]  # called with the step of a save that is under way
    saved: int | None  # the newest step that is saved or about to be
    _trees: dict[int, str] = field(default_factory=dict)
    _stops: set[int] = field(default_factory=set)  # steps whose snapshot says that the run is stopped there
    _abandoned: set[int] = field(default_factory=set)  # steps that were not committed, because a rank was lost

    def prepare(self) -> None:
        self.writer.prepare(self._divided().parts)

    @property
    def next(self) -> int:
        # The first boundary of a new run is saved, too: an attempt that fails early then starts from the same weights,
        # however they were drawn, and a store that cannot be written shows at once.
        every = self.config.save_every
        return 0 if self.saved is None else (self.saved // every + 1) * every

    @property
    def is_under_way(self) -> bool:
        return self.writer.is_busy

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        if step == self.saved:
            return 0.0
        began = perf_counter()
        progress.here.count_post()  # rank 0 waits for all ranks
        self.protected.check_groups()
        state = self._divided()
        ranks = self.ranks.fixed()
        vote = _Vote(
            saver=self,
            step=step,
            at=at,
            ranks=ranks,
            state=state,
            own=json.dumps([rng.capture(), self.protected.own(), self.position(), stops]),
            captured=perf_counter() - began,
        )
        with self.ranks.busy():
            self.writer.save(step, state.parts, vote.cast, rank=ranks.rank, count=ranks.size)
        self.saved = step
        return perf_counter() - began

    def hurry(self) -> None:
        self.writer.hurry()

    def regroup(self, settled: int | None) -> None:
        if settled is not None and settled >= self.next:
            self.saved = settled  # some ranks may have passed this boundary, so no rank saves there

    def collect(self) -> None:
        self._record(self.writer.finished())

    def close(self) -> None:
        try:
            with self.ranks.busy():
                self._record(self.writer.close())
        except HoldfastError:
            with suppress(HoldfastError):  # the first error is enough, but record what did become durable
                self.collect()
            raise
        if self.saved in self._abandoned:
            raise RanksChanged(f"save/{self.saved}")

    def _divided(self) -> DividedState:
        ranks = self.ranks
        return self.protected.divide(self.replicated, ranks.rank, ranks.size, ranks.tensor_parallel)

    def _record(self, durable: list[Saved]) -> None:
        record, number = self.attempt.record, self.attempt.number
        for save in durable:
            record.append(Save(number, save.step, self.config.writer, save.bytes, save.stall, save.retries))
            state, stops = snapshot_digest(save.digest, self._trees.pop(save.step)), save.step in self._stops
            record.append(Commit(number, save.step, save.bytes, save.seconds, state=state, stops=stops))
        if durable:
            record.flush()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Vote:
    """The vote of one rank for the commit of one save. `own` is JSON of the values that belong to this rank alone."""

    saver: CheckpointSaver
    step: int
    at: Position
    ranks: Ranks
    state: DividedState
    own: str
    captured: float  # seconds in which the state was flattened

    def cast(self, shard: WrittenShard) -> Ballot | None:
        """Vote for the commit, once this rank's file is written.

        On rank 0, wait for the votes of all ranks and return what to commit. Return None on other ranks, or if a rank
        is lost before it has voted."""
        self.saver.injected(self.step)
        self.saver.attempt.record.sync()
        text = json.dumps(
            [
                self.own,
                astuple(shard.digest),
                divided_digest(self.state.layout),
                asdict(self._stalled(shard)),
                shard.retries,
            ]
        )
        try:
            votes = self.ranks.gather(f"save/{self.step}", text)
        except RanksChanged:
            self.saver._abandoned.add(self.step)
            logger.warning("step %d was not saved: a rank was lost before all had written their part", self.step)
            return None
        return None if votes is None else self._ballot([json.loads(vote) for vote in votes])

    def _stalled(self, shard: WrittenShard) -> Stall:
        return shard.stall + Stall(waited=self.captured, snapshot=self.captured)

    def _ballot(self, votes: list[Any]) -> Ballot:
        owns, digests, _, stalls, retries = check_votes(votes, self.step)
        saver = self.saver
        generators, own, positions, stops = zip(*map(json.loads, owns), strict=True)
        if any(stops):
            saver._stops.add(self.step)
        saver._trees[self.step] = tree_digest(self.state.flat)
        extra = {
            **self.state.flat.extra,
            CONFIG: saver.plan.to_json(),
            CONDITIONS: saver.conditions.to_json(),
            GENERATORS: list(generators),
            **({OWN: list(own)} if any(own) else {}),
            **({POSITIONS: list(positions)} if any(positions) else {}),
            **({STOPPED: True} if any(stops) else {}),
            **({SHARDED: True} if saver.protected.is_sharded else {}),
        }
        draft = snapshot.draft(
            self.step,
            extra,
            self.state.layout,
            epoch=self.at.epoch,
            cursor=self.at.cursor,
            world=self.ranks.size,
            config=saver.fingerprint,
        )
        longest = max((Stall(**stall) for stall in stalls), key=lambda stall: stall.waited)
        return Ballot(draft, [Digest(*digest) for digest in digests], longest, sum(retries))


def divided_digest(layout: Mapping[str, ShardedTensor]) -> str:
    """Return a digest of the division of the tensors that all ranks save together. It must be equal on all ranks."""
    together = {name: tensor for name, tensor in layout.items() if tensor.sharding.splits}
    return str(xxhash.xxh3_64_hexdigest(json.dumps(sharding.to_json(together)).encode()))


def check_votes(votes: Sequence[Sequence[Any]], step: int) -> tuple[tuple[Any, ...], ...]:
    """Return each field of the votes as a tuple over the ranks. Raise BadInput if a rank divides the state differently.

    Such a rank has other tensors in its protected state than rank 0."""
    fields = tuple(zip(*votes, strict=True))
    divided = fields[2]
    if different := [rank for rank, division in enumerate(divided) if division != divided[0]]:
        raise BadInput(
            f"rank {different[0]} has other tensors in its protected state than rank 0, so step {step} cannot be saved: "
            "build the same model and optimizer on every rank."
        )
    return fields
