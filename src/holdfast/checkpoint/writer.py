"""Writers of snapshots: `blocking` writes while training waits, and `overlapped` writes in a background thread.

Every rank has a writer, and writes its own shard file. It then votes: it passes the digest of the file to a function of
the caller. On the rank that commits, this function returns the votes of all ranks, and the writer commits the snapshot.

Writers retry if the storage fails. They report how long each save stalled training, once the save is durable.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from holdfast.blocks.division import State
from holdfast.checkpoint import manifest, payload, snapshot
from holdfast.checkpoint.bandwidth import BandwidthLimit
from holdfast.checkpoint.capture import BufferPool, HostImage, StateCapture, device_of, make_ready
from holdfast.checkpoint.device import DeviceCopy
from holdfast.checkpoint.digest import Digest, Progress, unwatched
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.checkpoint.snapshot import BACKOFF, SnapshotDraft
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, StorageFailed
from holdfast.stall import Stall

logger = logging.getLogger(__name__)
_own_random = random.SystemRandom()  # the script's generators are part of its state

# Images (host memory for the copy of a state) allocated in advance. One is enough if saves do not overlap.
READY = 1
READY_PINNED = 2  # for the state of a device: pinning another one during a save takes longer than the save

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """The shard file that this rank has written: its digest, how long training waited, and the storage retries."""

    digest: Digest
    stall: Stall
    retries: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Ballot:
    """The votes of all ranks, on the rank that commits: the digests of their shard files, and the draft to commit.

    `stall` is taken from the rank where training waited longest. `retries` is the total over all ranks."""

    draft: SnapshotDraft
    shards: Sequence[Digest]
    stall: Stall
    retries: int = 0


Vote: TypeAlias = Callable[[WrittenShard], Ballot | None]
"""A function that passes this rank's shard to the rank that commits, and returns the votes of all ranks there."""


def alone(step: int, tensors: State, extra: Mapping[str, Any], **position: Any) -> Vote:
    """Return the vote function of a process that saves `tensors` alone; `position` are keyword arguments of `draft`."""
    draft = snapshot.draft(step, extra, snapshot.undivided(tensors), **position)
    return lambda shard: Ballot(draft, [shard.digest], shard.stall, shard.retries)


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed save: how long training waited (`stall`), `seconds` until it was durable, and removed old steps."""

    step: int
    bytes: int
    stall: Stall
    seconds: float
    retries: int
    removed: tuple[int, ...]
    digest: str = ""  # of its tensors


class Writer(Protocol):
    """A writer of snapshots into a store, in the order of the calls of `save`."""

    def prepare(self, tensors: State) -> None:
        """Start to allocate memory for saves of states like `tensors`, in the background. The call is optional."""

    def save(self, step: int, tensors: State, vote: Vote, *, rank: int = 0, count: int = 1) -> None:
        """Start to save the tensors of `rank`, one of `count` ranks; the caller may change them after the return.

        `vote` is called when the file is durable; if it raises, nothing is committed. Raise the error of an earlier
        save that failed."""

    def hurry(self) -> None:
        """Write everything from now on, including saves in progress, without a limit of the bandwidth. Thread-safe."""

    @property
    def is_busy(self) -> bool:
        """True if a save is in progress, or has completed but was not yet returned by `finished`."""

    def finished(self) -> list[Saved]:
        """Return the saves that this rank committed since the last call; raise the error of a save that failed."""

    def close(self) -> list[Saved]:
        """Wait until all saves have ended, and return the result of `finished`; raise the error of a failed save."""


def blocking(
    store: Store, *, keep_last: int, backoff: Sequence[float] = BACKOFF, progress: Progress = unwatched
) -> Writer:
    """Return a writer whose `save` returns when the snapshot is durable."""
    return _Blocking(_Target(store, keep_last, tuple(backoff), progress))


def overlapped(
    store: Store,
    *,
    keep_last: int,
    max_inflight: int = 2,
    backoff: Sequence[float] = BACKOFF,
    progress: Progress = unwatched,
    limit: BandwidthLimit | None = None,
) -> Writer:
    """Return a writer whose `save` copies the state into host memory; a background thread then writes the copy.

    At most `max_inflight` copies exist at a time; further saves wait. `limit` is that of the bandwidth."""
    limited = limit.limiting(progress) if limit else progress
    return _Overlapped(_Target(store, keep_last, tuple(backoff), limited), BufferPool(max_inflight), limit)


@dataclass(frozen=True, slots=True)
class _Target:
    store: Store
    keep_last: int
    backoff: tuple[float, ...]
    progress: Progress

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise BadInput(f"keep_last must be 1 or more (got {self.keep_last}).")

    def write(
        self, step: int, parts: Callable[[], Iterable[memoryview | bytes]], rank: int, count: int
    ) -> tuple[Digest, int]:
        """Write the shard file of `rank`; return its digest and the number of retries.

        `parts` returns the parts of the file; it is called again for each retry."""

        def write() -> Digest:
            digest = snapshot.write_shard(self.store, step, parts(), rank=rank, count=count, progress=self.progress)
            name = manifest.shard_name(step, rank, count, self.store.term)
            if name not in self.store.names(name):  # listing a name is cheap, reading the file is not
                raise self._lost(name)
            return digest

        return self._tried(step, write)

    def commit(self, ballot: Ballot, start: float) -> Saved:
        """Commit a snapshot whose save began at the time `start`, and delete all but the last `keep_last` snapshots."""
        step = ballot.draft.step

        def commit() -> Manifest:
            record = snapshot.commit(self.store, ballot.draft, ballot.shards, progress=self.progress)
            if lost := manifest.missing(self.store, record):
                raise self._lost(lost[0])
            return record

        record, retries = self._tried(step, commit)
        durable = perf_counter()
        removed, more = self._tried(step, lambda: self._remove_old(step))
        retries += ballot.retries + more
        return Saved(step, record.bytes, ballot.stall, durable - start, retries, removed, record.tensors)

    def _lost(self, name: str) -> StorageFailed:
        return StorageFailed(f"{name} is not in {self.store} although it was written: check the storage.")

    def _remove_old(self, step: int) -> tuple[int, ...]:
        old = tuple(snapshot.outdated(self.store, self.keep_last, trusted=step))
        for number in old:
            manifest.remove(self.store, number)
        # A worker that was lost may have left a part of an earlier save, which then was never committed.
        earlier = [number for number in manifest.steps(self.store) if number < step]
        if earlier:
            manifest.clear_uncommitted(self.store, before=earlier[-1])
        return old

    def _tried(self, step: int, work: Callable[[], T]) -> tuple[T, int]:
        """Call `work`, retrying if the storage fails, and return its result and the number of retries."""
        for retries, pause in enumerate((*self.backoff, None)):
            try:
                return work(), retries
            except StorageFailed as error:
                if pause is None:
                    raise StorageFailed(f"the save of step {step} failed {retries + 1} times: {error}") from error
                # Ranks that failed together do not try again together.
                pause *= _own_random.uniform(0.5, 1.5)
                logger.warning("saving step %d again in %.2g s: %s", step, pause, error)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


class _Blocking:
    """A writer that makes training wait until the file is durable; the rank that commits also waits for the commit."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._saved: list[Saved] = []

    def prepare(self, tensors: State) -> None:
        pass  # it needs no memory

    def save(self, step: int, tensors: State, vote: Vote, *, rank: int = 0, count: int = 1) -> None:
        start = perf_counter()
        digest, retries = self._target.write(step, lambda: payload.encode(tensors, digests=True), rank, count)
        waited = perf_counter() - start
        ballot = vote(WrittenShard(digest, Stall(waited=waited, write=waited), retries))
        if ballot is None:
            return
        sync = perf_counter() - start - waited
        saved = self._target.commit(ballot, start)
        committing = perf_counter() - start - waited - sync
        rest = Stall(waited=sync + committing, sync=sync, write=committing)
        self._saved.append(replace(saved, stall=saved.stall + rest))

    def hurry(self) -> None:
        pass  # it has no limit

    @property
    def is_busy(self) -> bool:
        return bool(self._saved)

    def finished(self) -> list[Saved]:
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> list[Saved]:
        return self.finished()


class _Overlapped:
    """A writer that lets training continue while one background thread writes the file and votes."""

    def __init__(self, target: _Target, images: BufferPool, limit: BandwidthLimit | None) -> None:
        self._target, self._images, self._limit = target, images, limit
        self._capture = StateCapture()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-writer")  # low priority would delay the GIL
        self._saves: deque[Future[Saved | None]] = deque()

    def prepare(self, tensors: State) -> None:
        layout, device = self._capture.layout(tensors), device_of(tensors)
        count = READY_PINNED if device else READY
        reserved = self._images.reserve(layout.file_length, count)  # now, because they count towards the limit
        self._thread.submit(self._make_ready, reserved, count, layout, device)

    def save(self, step: int, tensors: State, vote: Vote, *, rank: int = 0, count: int = 1) -> None:
        self._raise_failure()
        start = perf_counter()
        layout = self._capture.layout(tensors)
        laid_out = perf_counter()
        image = self._images.take(layout.file_length)
        taken = perf_counter()
        try:
            copy = _Copy(image, layout, self._capture.fill(image, layout, tensors))
        except BaseException:
            self._images.give_back(image)
            raise
        captured = perf_counter()
        stall = Stall(
            waited=captured - start, snapshot=captured - taken, enqueue=laid_out - start, backpressure=taken - laid_out
        )
        self._saves.append(self._thread.submit(self._write, step, copy, stall, start, vote, rank, count))

    def hurry(self) -> None:
        if self._limit:
            self._limit.lift()

    @property
    def is_busy(self) -> bool:
        return bool(self._saves)

    def finished(self) -> list[Saved]:
        saved: list[Saved] = []
        while self._saves and self._saves[0].done():
            if saved and self._saves[0].exception():
                break  # raised by the next call, after the saves before it are reported
            if (ended := self._saves.popleft().result()) is not None:
                saved.append(ended)
        return saved

    def close(self) -> list[Saved]:
        self.hurry()
        self._thread.shutdown()
        self._capture.helpers.shutdown()
        self._images.clear()
        self._raise_failure()
        return self.finished()

    def _raise_failure(self) -> None:
        for save in self._saves:
            if save.done() and (failure := save.exception()):
                self._saves.remove(save)
                raise failure

    def _make_ready(
        self, reserved: list[HostImage], count: int, layout: PayloadLayout, device: torch.device | None
    ) -> None:
        # Earlier saves have completed, so their images may be free now: replace those that are too small.
        for image in [*reserved, *self._images.reserve(layout.file_length, count)]:
            try:
                make_ready(image, layout, device)
            finally:
                self._images.give_back(image)

    def _write(
        self, step: int, copy: "_Copy", stall: Stall, start: float, vote: Vote, rank: int, count: int
    ) -> Saved | None:
        try:
            device = copy.wait()  # a device captures asynchronously, so the wait of training is known only now
            began = perf_counter()
            digest, retries = self._target.write(step, copy.parts, rank, count)
        finally:
            self._images.give_back(copy.image)
        written = Stall(waited=device, snapshot=device, overlapped=perf_counter() - began)
        ballot = vote(WrittenShard(digest, stall + written, retries))
        return None if ballot is None else self._target.commit(ballot, start)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy of a rank's tensors in host memory. Copies from a GPU may still be in progress."""

    image: HostImage
    layout: PayloadLayout
    departures: list[DeviceCopy]

    def wait(self) -> float:
        """Wait for the copies from a GPU, and return the seconds that training waited for them."""
        return sum(departure.wait() for departure in self.departures)

    def parts(self) -> list[memoryview]:
        return [self.image.bytes[: self.layout.length].data]
