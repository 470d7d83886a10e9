"""The saves of a run: every rank contributes its generators, rank 0 captures and writes, and says what became of it.

No snapshot covers a step that is not on record: a commit waits until every rank's history is on the disk up to it.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from holdfast import progress
from holdfast.checkpoint.state_tree import flatten
from holdfast.checkpoint.writer import Saved, Writer
from holdfast.distributed.boundary import NEVER
from holdfast.distributed.ranks import Changed, Ranks
from holdfast.errors import HoldfastError
from holdfast.events import JSON, Commit, Save
from holdfast.sampler.plan import Position
from holdfast.stall import Stall
from holdfast.train.state import rng
from holdfast.train.state.attempt import Recorder
from holdfast.train.state.protected import Protected, tree_digest
from holdfast.train.state.restore import POSITIONS, STOPPED, state_digest
from holdfast.train.state.snapshot_extra import CONDITIONS, Conditions


class Saves(Protocol):
    """How a run saves: when it is due, now, and to the end."""

    def prepare(self) -> None:
        """Have the memory ready that saves need, now that the state is as large as it will be."""

    @property
    def next(self) -> int:
        """The step at or after which the state is to be saved next."""

    @property
    def is_under_way(self) -> bool:
        """Whether there are saves to be collected, now or later."""

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        """Save the state after so many steps, with which the script of this rank stops or not; seconds that it took."""

    def regroup(self, settled: int | None) -> None:
        """Peers have changed, some of them at the boundary before this step: whoever is rank 0 now saves from now on."""

    def collect(self) -> None:
        """Say which saves are durable by now; a save that failed for good raises here."""

    def close(self) -> None:
        """Wait until every save is durable, and say so."""


class Unsaved:
    """The saves of a run without a folder: none."""

    def prepare(self) -> None:
        pass

    @property
    def next(self) -> int:
        return NEVER

    @property
    def is_under_way(self) -> bool:
        return False

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
    """The saves of a run with a folder. Only rank 0 has a writer; the others give their part and go on."""

    world: Ranks
    writer: Writer | None
    word: str
    every: int
    record: Recorder
    attempt: int
    protected: Protected
    config: Mapping[str, JSON]
    conditions: Conditions
    fingerprint: str
    saved: int | None  # the newest step that is saved or about to be
    _stalls: dict[int, Stall] = field(default_factory=dict)
    _trees: dict[int, str] = field(default_factory=dict)
    _stops: set[int] = field(default_factory=set)  # steps of which the state says that the run is stopped there
    make_writer: Callable[[], Writer] | None = None  # for a rank that becomes the first
    position: Callable[[], tuple[int, str] | None] = lambda: (
        None
    )  # where the loader is that feeds this rank, if one does
    injected: Callable[[int], None] = lambda step: None  # called where a save of this step is under way
    _syncing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "holdfast-history"))

    def prepare(self) -> None:
        if self.writer is not None:
            self.writer.prepare(flatten(self.protected.capture()).tensors)

    @property
    def next(self) -> int:
        # The first boundary of a fresh start, too: an attempt that fails early then starts again from the same weights,
        # however they were drawn; and a place that cannot be written shows at once.
        return 0 if self.saved is None else (self.saved // self.every + 1) * self.every

    @property
    def is_under_way(self) -> bool:
        return self.writer is not None and self.writer.is_busy

    def take(self, step: int, at: Position, *, stops: bool = False) -> float:
        if step == self.saved:
            return 0.0
        began = perf_counter()
        progress.here.posts()  # rank 0 waits for all
        with self.world.busy():
            said = json.dumps([rng.capture(), self.protected.own(), self.position(), stops])
            if self.writer is not None:
                self._save(self.writer, step, at, said, began)
            else:
                self.world.gather(_topic(step), said)
                self.saved = step
                self.injected(step)
                self._syncing.submit(self._put_on_record, step, self.world.as_it_is())
        return perf_counter() - began

    def regroup(self, settled: int | None) -> None:
        if settled is not None and settled >= self.next:
            self.saved = settled  # some ranks may have passed this boundary: nobody saves there
        if self.writer is None and self.world.rank == 0 and self.make_writer:
            self.writer = self.make_writer()
        if self.writer is not None and self.world.rank:
            self._tell(self.writer.close())
            self.writer = None

    def collect(self) -> None:
        if self.writer is not None:
            self._tell(self.writer.finished())

    def close(self) -> None:
        self._syncing.shutdown()
        if self.writer is None:
            return
        try:
            with self.world.busy():
                self._tell(self.writer.close())
        except HoldfastError:
            with suppress(HoldfastError):  # one is enough; but what did become durable is on record
                self.collect()
            raise

    def _save(self, writer: Writer, step: int, at: Position, said: str, began: float) -> None:
        """Have our state copied, and only then wait for what the others say: they may be late, and it takes as long."""
        self.protected.check_groups()
        flat = flatten(self.protected.capture())
        self._trees[step] = tree_digest(flat)
        peers = self.world.as_it_is()
        captured = perf_counter()

        def of_all_ranks() -> dict[str, Any]:
            asked = perf_counter()
            told = self._told(step, self.world.gather(_topic(step), said) or [said])
            self.saved = step
            sync = perf_counter() - asked
            self._stalls[step] = Stall(waited=captured - began + sync, sync=sync, snapshot=captured - began)
            return told

        writer.save(
            step,
            flat.tensors,
            {**flat.extra, "config": dict(self.config), CONDITIONS: self.conditions.to_json()},
            epoch=at.epoch,
            cursor=at.cursor,
            world=self.world.size,
            config=self.fingerprint,
            more=of_all_ranks,
            ready=lambda: self._all_on_record(step, peers),
        )

    def _told(self, step: int, states: list[str]) -> dict[str, Any]:
        """What belongs to a snapshot beside the state that all ranks share: what each of them has said, in order."""
        drawn, own, positions, stops = zip(*map(json.loads, states), strict=True)
        if any(stops):
            self._stops.add(step)
        return {
            "generators": list(drawn),
            **({"own": list(own)} if any(own) else {}),
            **({POSITIONS: list(positions)} if any(positions) else {}),
            **({STOPPED: True} if step in self._stops else {}),
        }

    def _put_on_record(self, step: int, peers: Ranks) -> None:
        """Runs in a thread, since a disk takes its time: our history is on the disk up to this step."""
        self.record.sync()
        peers.tell(f"on-record/{step}/{peers.rank}", "")

    def _all_on_record(self, step: int, peers: Ranks) -> None:
        """Wait until every rank's history is on the disk up to this step: what is committed must be auditable."""
        self.injected(step)
        self.record.sync()
        with suppress(Changed):  # whoever is lost has handed over what it had
            for rank in range(1, peers.size):
                peers.hear(f"on-record/{step}/{rank}")

    def _tell(self, several: list[Saved]) -> None:
        for saved in several:
            stall = saved.stall + self._stalls.pop(saved.step, Stall())
            self.record.append(Save(self.attempt, saved.step, self.word, saved.bytes, stall, saved.retries))
            state = state_digest(saved.digest, self._trees.pop(saved.step))
            self.record.append(
                Commit(
                    self.attempt, saved.step, saved.bytes, saved.seconds, state=state, stops=saved.step in self._stops
                )
            )
        if several:
            self.record.flush()


def _topic(step: int) -> str:
    return f"save/{step}"
