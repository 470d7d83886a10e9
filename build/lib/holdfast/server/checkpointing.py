"""Checkpoints of a run: nodes choose blocks together, and training continues while these are written and committed."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from holdfast import events
from holdfast.blocks.division import Ids
from holdfast.checkpoint.index import generations
from holdfast.checkpoint.running import RunningCheckpoint, Segment
from holdfast.checkpoint.store import Store
from holdfast.errors import StorageFailed
from holdfast.sampler.digest import Samples
from holdfast.server.members import ServerMembers, call, gather
from holdfast.server.selection import exchange
from holdfast.server.settings import Settings
from holdfast.workloads.divided import DividedWorkload

Record = Callable[[events.What], None]
PATIENCE = 120.0  # seconds for the store to take a save


class NodesLost(Exception):
    """An exception that says that nodes did not answer and count as lost; `missing` has the reason for each node."""

    def __init__(self, missing: Mapping[int, str]) -> None:
        super().__init__(missing)
        self.missing = missing


class ServerSave(NamedTuple):
    """The result of a save. `committed` is False if no block was written, or if the initial save lacks blocks."""

    iteration: int
    bytes: int
    seconds: float
    lost: Mapping[int, str]
    committed: bool
    blocks: Ids


class SelectedBlocks(NamedTuple):
    """The blocks chosen for a save, their size in bytes, and the nodes that were lost meanwhile.

    `distances` says for each node how much its other blocks have changed since they were saved."""

    blocks: Samples
    bytes: int
    distances: dict[int, float]
    lost: Mapping[int, str]


class CheckpointCoordinator:
    """The controller's interface to the run's incremental checkpoint; at most one save is in progress."""

    def __init__(self, settings: Settings, workload: DividedWorkload, members: ServerMembers, record: Record) -> None:
        self._settings, self._blocks, self._members, self._record = settings, workload.blocks, members, record
        self._store: Store = settings.open()
        self.credit = Fraction(0)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._pending: Future[ServerSave] | None = None
        self._given_up: dict[int, str] = {}
        if self.exists:
            self._running = RunningCheckpoint.open(self._store, self._blocks, writer="controller")
        else:
            self._running = RunningCheckpoint(self._store, self._blocks, "controller")

    @property
    def exists(self) -> bool:
        return bool(generations(self._store))

    @property
    def saved_at(self) -> Ids:
        return self._running.saved_at

    def select(self, step: int) -> SelectedBlocks:
        """Select the blocks to save after iteration `step`, and let each node copy its selected blocks to a buffer."""
        policy = self._settings.policy.at(step)
        verdict, self.credit = exchange(policy, self.credit, lambda *question: self._answers(step, *question))
        answers = self._members.ask("node", "save", dict.fromkeys(self._members.nodes, (step, verdict, self.credit)))
        parts = answers.results
        blocks, size = Samples.total(part.blocks for part in parts.values()), sum(part.bytes for part in parts.values())
        distances = {node: part.distance for node, part in parts.items() if part.distance is not None}
        return SelectedBlocks(blocks, size, distances, answers.missing)

    def write(self, step: int, size: int) -> None:
        """Let nodes write their buffered blocks (`size` bytes in all) in the background, for the save of `step`."""
        began, sequence = time.perf_counter(), self._running.reserve()
        calls = {node: call(actor, "write", sequence) for node, actor in self._members.nodes.items()}
        self._given_up = {}
        self._pending = self._threads.submit(self._commit, calls, step, size, began)

    def poll(self) -> None:
        if self._pending is not None and self._pending.done():
            self.settle()

    def settle(self, without: Mapping[int, str] | None = None) -> ServerSave | None:
        """Wait until the save in progress is committed, and return it; return None if no save is in progress.

        `without` has lost nodes, with the reasons; the save does not wait for these nodes."""
        if self._pending is None:
            return None
        self._given_up.update(without or {})
        pending, self._pending = self._pending, None
        saved = self._await_commit(pending)
        if saved.committed:
            blocks = saved.blocks.tolist()
            self._record(events.Commit(0, saved.iteration, saved.bytes, saved.seconds, blocks=blocks))
        return saved

    def holding(self, ids: Ids) -> list[Segment]:
        """Return the segments (files of saved blocks) that nodes need to restore the blocks `ids`."""
        return self._running.holding(ids)

    def close(self) -> None:
        self._threads.shutdown()

    def _await_commit(self, pending: "Future[ServerSave]") -> ServerSave:
        deadline = time.monotonic() + PATIENCE + 10
        while True:
            try:
                return pending.result(timeout=0.05)
            except TimeoutError:
                if pending.done():
                    raise
                if time.monotonic() > deadline:
                    waited = f"did not take a save within {PATIENCE:g} s"
                    raise StorageFailed(f"the store {self._settings.store} {waited}: see what keeps it") from None
            lost = self._members.look()
            self._given_up.update({who.number: why for who, why in lost.items() if who.kind == "node"})

    def _commit(self, calls: dict[int, Any], step: int, size: int, began: float) -> ServerSave:
        answers = gather(calls, lambda: dict(self._given_up), PATIENCE)
        segments = [segment for node in sorted(answers.results) for segment in answers.results[node]]
        committed = bool(segments) and not (step == 0 and answers.missing)
        if committed:
            self._running.commit(segments)
        blocks = np.sort(np.concatenate([np.zeros(0, np.int64), *(segment.ids for segment in segments)]))
        return ServerSave(step, size, time.perf_counter() - began, answers.missing, committed, blocks)

    def _answers(self, step: int, *question: Any) -> Sequence[Any]:
        answers = self._members.ask("node", "answer", dict.fromkeys(self._members.nodes, (step, *question)))
        if answers.missing:
            raise NodesLost(answers.missing)
        return [answers.results[node] for node in sorted(answers.results)]
