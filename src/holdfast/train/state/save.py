"""Save the state of a run: every rank contributes its generator states, and rank 0 writes and records the snapshot.

A snapshot never covers a step that is missing from a history: a commit waits until the history of every rank is on disk
up to that step.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
import xxhash

from holdfast import progress
from holdfast.checkpoint.payload import flatten
from holdfast.checkpoint.writer import Saved, Writer
from holdfast.distributed.ranks import NEVER, Ranks, RanksChanged
from holdfast.errors import BadInput, HoldfastError
from holdfast.events import JSON, Commit, Save
from holdfast.runs.config import RunConfig
from holdfast.sampler.plan import Position
from holdfast.sampler.run_plan import RunPlan
from holdfast.stall import Stall
from holdfast.train.state import rng
from holdfast.train.state.attempt import AttemptContext
from holdfast.train.state.protected import Protected, tree_digest

logger = logging.getLogger(__name__)
STATE = "state"  # everything of the protected objects but their tensors
CONFIG = "config"  # the sample plan
CONDITIONS = "conditions"
GENERATORS = "generators"  # the states of the random generators, one entry per rank
OWN = "own"  # plain values that belong to one rank, one entry per rank
POSITIONS = "positions"  # the position of each rank's loader, if loaders feed the run
STOPPED = "stopped"  # the script stopped the run at this step


@dataclass(frozen=True, slots=True)
class Conditions:
    """Facts that a resumed run is checked against: digests of a few samples, and the number of threads per worker.

    `data` is the digest for the first phase (training loop), `later_data` has those for later phases."""

    data: str | None
    threads: int
    later_data: tuple[str | None, ...] = ()

    @classmethod
    def now(cls, data: Sequence[str | None]) -> "Conditions":
        """Return the conditions of this process.

        `data` has a digest of a few samples for each phase (training loop)."""
        return cls(data[0], torch.get_num_threads(), tuple(data[1:]))

    @property
    def all_data(self) -> tuple[str | None, ...]:
        return (self.data, *self.later_data)

    def to_json(self) -> dict[str, JSON]:
        later: dict[str, JSON] = {"later_data": list(self.later_data)} if self.later_data else {}
        return {"data": self.data, "threads": self.threads, **later}

    def check(self, saved: Mapping[str, JSON], *, same_world: bool, warns: bool) -> None:
        """Raise BadInput if the dataset is not the one in `saved`, the conditions in a snapshot.

        If `warns` and `same_world`, log a warning if the number of threads per worker has changed."""
        later, threads = saved.get("later_data"), saved.get("threads")
        data = [saved.get("data"), *(later if isinstance(later, list) else ())]
        pairs = zip(self.all_data, data, strict=False)  # a run may be extended by a phase
        if any(mine is not None and theirs is not None and mine != theirs for mine, theirs in pairs):
            raise BadInput(
                "the dataset holds other samples than when this run was saved. A split or shuffle before attach() "
                "without a seed does that: give the run the same samples, or name another --out."
            )
        if warns and same_world and isinstance(threads, int) and threads != self.threads:
            logger.warning(
                "this run was trained with %d threads per worker and resumes with %d: sums may round differently, so the "
                "result may differ in its last bits from a run that never stopped. Set OMP_NUM_THREADS=%d to avoid that.",
                threads,
                self.threads,
                threads,
            )


def state_digest(tensors: str, tree: str) -> str:
    """Return the digest of a snapshot, from the digest of its `tensors` and that of its other state (`tree`)."""
    return str(xxhash.xxh3_128_hexdigest(f"{tensors} {tree}".encode()))


class Saves(Protocol):
    """The interface of an object that saves the state of a run when a save is due."""

    def prepare(self) -> None:
        """Allocate memory for saves. Call this once the state has its final size."""

    @property
    def next(self) -> int:
        """The next step before which the state is to be saved."""

    @property
    def is_under_way(self) -> bool:
        """True while a save is being written, or is written but not yet recorded in the history."""

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        """Save the state before `step`, at position `at` in the data; return the seconds that training waited.

        `stops` is True if the run stops after this save, and is recorded in the snapshot."""

    def regroup(self, settled: int | None) -> None:
        """Adapt to changed ranks. Skip a save at step `settled`, which some ranks may already be training."""

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

    def regroup(self, settled: int | None) -> None:
        pass

    def collect(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True, kw_only=True, eq=False)
class CheckpointSaver:
    """The part of one rank in saving checkpoints. Rank 0 writes them; other ranks send their own values to rank 0.

    If a worker is lost, another worker may become rank 0. The former rank 0 completes its saves in a thread, before it
    sends its values for the next save, so two workers never write at once.

    `position` returns the data loader's position. `injected` is called with the step of each save, to inject failures.
    `saved` is the newest step that is saved or being saved."""

    config: RunConfig
    attempt: AttemptContext
    ranks: Ranks
    writer: Writer | None
    make_writer: Callable[[], Writer]  # for a rank that becomes rank 0
    protected: Protected
    plan: RunPlan
    fingerprint: str  # identifies the plan and the protected objects
    conditions: Conditions
    position: Callable[[], tuple[int, str] | None]  # of the loader that feeds this rank, if there is one
    injected: Callable[[int], None]  # called with the step of a save that is under way
    saved: int | None  # the newest step that is saved or about to be
    _stalls: dict[int, Stall] = field(default_factory=dict)
    _trees: dict[int, str] = field(default_factory=dict)
    _stops: set[int] = field(default_factory=set)  # steps whose snapshot says that the run is stopped there
    _handed_over: list[Future[list[Saved]]] = field(default_factory=list)  # saves begun while this rank was rank 0
    _syncing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "holdfast-history"))

    def prepare(self) -> None:
        if self.writer is not None:
            self.writer.prepare(flatten(self.protected.capture()).tensors)

    @property
    def next(self) -> int:
        # The first boundary of a new run is saved, too: an attempt that fails early then starts from the same weights,
        # however they were drawn, and a store that cannot be written shows at once.
        every = self.config.save_every
        return 0 if self.saved is None else (self.saved // every + 1) * every

    @property
    def is_under_way(self) -> bool:
        return bool(self._handed_over) or (self.writer is not None and self.writer.is_busy)

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        if step == self.saved:
            return 0.0
        began = perf_counter()
        progress.here.count_post()  # rank 0 waits for all ranks
        with self.ranks.busy():
            part = json.dumps([rng.capture(), self.protected.own(), self.position(), stops])
            if self.writer is not None:
                self._record_handed_over(waits=True)
                self._write(self.writer, step, at, part, began)
            else:
                self._send(step, part)
                self.saved = step
                self.injected(step)
                self._syncing.submit(self._sync_history, step, self.ranks.fixed())
        return perf_counter() - began

    def regroup(self, settled: int | None) -> None:
        if settled is not None and settled >= self.next:
            self.saved = settled  # some ranks may have passed this boundary, so no rank saves there
        if self.writer is None and self.ranks.rank == 0:
            self.writer = self.make_writer()
        if self.writer is not None and self.ranks.rank:
            self._handed_over.append(self._syncing.submit(self.writer.close))
            self.writer = None

    def collect(self) -> None:
        self._record_handed_over()
        if self.writer is not None:
            self._record(self.writer.finished())

    def close(self) -> None:
        self._syncing.shutdown()
        self._record_handed_over()
        if self.writer is None:
            return
        try:
            with self.ranks.busy():
                self._record(self.writer.close())
        except HoldfastError:
            with suppress(HoldfastError):  # the first error is enough, but record what did become durable
                self.collect()
            raise

    def _send(self, step: int, part: str) -> None:
        """Send `part`, this rank's own values as JSON, to rank 0, which writes the snapshot of `step`."""
        if self._handed_over:
            self._syncing.submit(
                self.ranks.fixed().gather, f"save/{step}", part
            )  # that thread completes the saves first
        else:
            self.ranks.gather(f"save/{step}", part)

    def _record_handed_over(self, *, waits: bool = False) -> None:
        while self._handed_over and (waits or self._handed_over[0].done()):
            self._record(self._handed_over.pop(0).result())

    def _write(self, writer: Writer, step: int, at: Position, part: str, began: float) -> None:
        """Save the state before `step` with `writer`, on rank 0, together with every rank's own values.

        `part` has the values of rank 0. `at` is the position of the step in the data, and `began` the time when the
        save began."""
        self.protected.check_groups()
        flat = flatten(self.protected.capture())
        self._trees[step] = tree_digest(flat)
        peers = self.ranks.fixed()
        captured = perf_counter()

        def gather_parts() -> dict[str, Any]:
            asked = perf_counter()
            extra = self._merged(step, self.ranks.gather(f"save/{step}", part) or [part])
            self.saved = step
            sync = perf_counter() - asked
            self._stalls[step] = Stall(waited=captured - began + sync, sync=sync, snapshot=captured - began)
            return extra

        writer.save(
            step,
            flat.tensors,
            {**flat.extra, CONFIG: self.plan.to_json(), CONDITIONS: self.conditions.to_json()},
            epoch=at.epoch,
            cursor=at.cursor,
            world=self.ranks.size,
            config=self.fingerprint,
            more=gather_parts,
            ready=lambda: self._await_histories(step, peers),
        )

    def _merged(self, step: int, parts: list[str]) -> dict[str, Any]:
        generators, own, positions, stops = zip(*map(json.loads, parts), strict=True)
        if any(stops):
            self._stops.add(step)
        return {
            GENERATORS: list(generators),
            **({OWN: list(own)} if any(own) else {}),
            **({POSITIONS: list(positions)} if any(positions) else {}),
            **({STOPPED: True} if step in self._stops else {}),
        }

    def _sync_history(self, step: int, peers: Ranks) -> None:
        self.attempt.record.sync()
        peers.post(f"on-record/{step}/{peers.rank}", "")

    def _await_histories(self, step: int, peers: Ranks) -> None:
        """Wait until the history of every rank is on disk up to `step`, so that the commit can be audited."""
        self.injected(step)
        self.attempt.record.sync()
        with suppress(RanksChanged):  # a lost rank has handed over its state
            for rank in range(1, peers.size):
                peers.wait_for(f"on-record/{step}/{rank}")

    def _record(self, durable: list[Saved]) -> None:
        record, number = self.attempt.record, self.attempt.number
        for save in durable:
            stall = save.stall + self._stalls.pop(save.step, Stall())
            record.append(Save(number, save.step, self.config.writer, save.bytes, stall, save.retries))
            state, stops = state_digest(save.digest, self._trees.pop(save.step)), save.step in self._stops
            record.append(Commit(number, save.step, save.bytes, save.seconds, state=state, stops=stops))
        if durable:
            record.flush()
