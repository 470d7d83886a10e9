"""Writers of snapshots: `blocking`, for which training waits, and `overlapped`, which writes in the background.

Both retry when the storage refuses, and both commit through `snapshot`. The cost of a save is reported once it is durable;
the caller measures the wait for other ranks (`Stall.sync`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from holdfast.blocks.division import State
from holdfast.checkpoint import payload, snapshot
from holdfast.checkpoint.capture import BufferPool, Capture, Image, device_of, make_ready
from holdfast.checkpoint.device import Departure
from holdfast.checkpoint.digest import Progress, unwatched
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.checkpoint.snapshot import BACKOFF, Draft, Manifest, at_once
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, StorageFailed
from holdfast.stall import Stall

logger = logging.getLogger(__name__)

# Images allocated in advance. One is enough as long as a save is durable before the next one begins.
READY = 1
READY_PINNED = 2  # for the state of a device: pinning another one during a save takes longer than the save

T = TypeVar("T")
Ready: TypeAlias = Callable[[], None]
More: TypeAlias = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable save: the stall of training, the seconds from its start until then, and the steps it removed."""

    step: int
    bytes: int
    stall: Stall
    seconds: float
    retries: int
    removed: tuple[int, ...]
    digest: str = ""  # of its tensors


class Writer(Protocol):
    """A writer of states into a store, one after the other."""

    def prepare(self, tensors: State) -> None:
        """Allocate the memory for a save of such a state, in the background.

        A save that comes sooner allocates its own, or waits for this if the limit is reached.
        """

    def save(
        self,
        step: int,
        tensors: State,
        extra: Mapping[str, Any],
        more: More = dict,
        ready: Ready = at_once,
        **position: Any,
    ) -> None:
        """Capture a state; training may change it when this returns. Raise the error of an earlier failed save.

        `position` is the epoch, cursor, world and config, as for `snapshot.draft`. `more` is called when the tensors are copied, and returns the rest of the extra, such as the reports of other
        ranks; if it raises, nothing is saved. `ready` is called in the writing thread before the commit, which waits
        until it returns.
        """

    @property
    def is_busy(self) -> bool:
        """True if `finished` has something to report, now or later."""

    def finished(self) -> list[Saved]:
        """Return the saves that became durable since the last call; raise if the next one has failed for good."""

    def close(self) -> list[Saved]:
        """Wait until every save is durable; raise if one has failed, after which `finished` still reports the others."""


def blocking(
    store: Store, *, keep_last: int, backoff: Sequence[float] = BACKOFF, progress: Progress = unwatched
) -> Writer:
    """Return a writer that training waits for, without memory of its own and without background work.

    `progress` is called with the number of bytes written.
    """
    return _Blocking(_Target(store, keep_last, tuple(backoff), progress))


def overlapped(
    store: Store,
    *,
    keep_last: int,
    max_inflight: int = 2,
    budget: int | None = None,
    backoff: Sequence[float] = BACKOFF,
    progress: Progress = unwatched,
) -> Writer:
    """Return a writer that training waits for only while the state is copied; a thread writes the copy.

    At most `max_inflight` saves are copied and not yet durable, in at most `budget` bytes of host memory. `progress` is
    called in the writing thread with the number of bytes written.
    """
    return _Overlapped(_Target(store, keep_last, tuple(backoff), progress), BufferPool(max_inflight, budget))


@dataclass(frozen=True, slots=True)
class _Written:
    """The result of writing a draft, and when it was durable."""

    bytes: int
    retries: int
    removed: tuple[int, ...]
    durable: float
    digest: str

    def saved(self, step: int, stall: Stall, start: float) -> Saved:
        return Saved(step, self.bytes, stall, self.durable - start, self.retries, self.removed, self.digest)


@dataclass(frozen=True, slots=True)
class _Target:
    """The store, the number of snapshots to keep, and the pauses between retries."""

    store: Store
    keep_last: int
    backoff: tuple[float, ...]
    progress: Progress

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise BadInput(f"keep_last must be 1 or more (got {self.keep_last}).")

    def write(self, draft: Draft, tensors: Callable[[], Iterable[memoryview | bytes]], ready: Ready) -> _Written:
        """Commit a draft and remove the snapshots that it made outdated."""
        step = draft.step

        def commit() -> Manifest:
            manifest = snapshot.commit(self.store, draft, tensors(), ready=ready, progress=self.progress)
            if lost := snapshot.missing(self.store, manifest):  # listing the names is cheap, reading them is not
                raise StorageFailed(f"{lost[0]} is not in {self.store} although it was written: check the storage.")
            return manifest

        manifest, retries = self._tried(step, commit)
        durable = perf_counter()
        removed, more = self._tried(step, lambda: snapshot.outdated(self.store, self.keep_last, trusted=step))
        retries += more
        for old in removed:
            _, more = self._tried(step, lambda old=old: snapshot.remove(self.store, old))  # type: ignore[misc]
            retries += more
        return _Written(manifest.bytes, retries, tuple(removed), durable, manifest.tensors)

    def _tried(self, step: int, work: Callable[[], T]) -> tuple[T, int]:
        """Return the result of `work` and the number of retries."""
        for retries, pause in enumerate((*self.backoff, None)):
            try:
                return work(), retries
            except StorageFailed as error:
                if pause is None:
                    raise StorageFailed(f"the save of step {step} failed {retries + 1} times: {error}") from error
                logger.warning("saving step %d again in %g s: %s", step, pause, error)
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


class _Blocking:
    """The writer that training waits for."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._saved: list[Saved] = []

    def prepare(self, tensors: State) -> None:
        pass  # it needs no memory

    def save(
        self,
        step: int,
        tensors: State,
        extra: Mapping[str, Any],
        more: More = dict,
        ready: Ready = at_once,
        **position: Any,
    ) -> None:
        rest = more()
        start = perf_counter()
        draft = snapshot.draft(step, {**extra, **rest}, **position)
        captured = perf_counter()
        written = self._target.write(draft, lambda: payload.encode(tensors), ready)
        end = perf_counter()
        stall = Stall(waited=end - start, snapshot=captured - start, write=end - captured)
        self._saved.append(written.saved(step, stall, start))

    @property
    def is_busy(self) -> bool:
        return bool(self._saved)

    def finished(self) -> list[Saved]:
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> list[Saved]:
        return self.finished()


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A save in flight."""

    step: int
    start: float
    stall: Stall
    landing: "Future[tuple[_Written, float, float]]"

    def landed(self) -> Saved:
        """Return the save when it is durable; raise the error that it failed with."""
        written, device, overlapped = self.landing.result()
        # A device captures the state asynchronously, so the wait of training is known only afterwards.
        stall = self.stall + Stall(waited=device, snapshot=device, overlapped=overlapped)
        return written.saved(self.step, stall, self.start)


class _Overlapped:
    """The writer that copies the state and writes it in one thread, in the order of the saves.

    It uses a thread, not a process: the disk takes the copy directly and digests are computed outside the interpreter's
    lock, so training hardly notices. Its priority is not lowered: a thread that is scheduled late while it holds that lock
    would delay training.
    """

    def __init__(self, target: _Target, images: BufferPool) -> None:
        self._target, self._images = target, images
        self._capture = Capture()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-writer")
        self._flights: deque[_Flight] = deque()

    def prepare(self, tensors: State) -> None:
        layout, device = self._capture.layout(tensors), device_of(tensors)
        count = READY_PINNED if device else READY
        reserved = self._images.reserve(layout.length, count)  # now, because they count towards the limit
        self._thread.submit(self._make_ready, reserved, count, layout, device)

    def save(
        self,
        step: int,
        tensors: State,
        extra: Mapping[str, Any],
        more: More = dict,
        ready: Ready = at_once,
        **position: Any,
    ) -> None:
        self._raise_failure()
        start = perf_counter()
        layout = self._capture.layout(tensors)
        laid_out = perf_counter()
        image = self._images.take(layout.length)
        taken = perf_counter()
        departures: list[Departure] = []
        try:
            departures += self._capture.fill(image, layout, tensors)
            captured = perf_counter()
            rest = more()
            complete = perf_counter()
            draft = snapshot.draft(step, {**extra, **rest}, **position)
            landing = self._thread.submit(self._write, draft, image, layout, departures, ready)
        except BaseException:
            for departure in departures:
                departure.wait()  # the copy still writes to this image
            self._images.give_back(image)
            raise
        enqueued = perf_counter()
        stall = Stall(
            waited=enqueued - start - (complete - captured),
            snapshot=captured - taken,
            enqueue=laid_out - start + enqueued - complete,
            backpressure=taken - laid_out,
        )
        self._flights.append(_Flight(step, start, stall, landing))

    @property
    def is_busy(self) -> bool:
        return bool(self._flights)

    def finished(self) -> list[Saved]:
        saved: list[Saved] = []
        while self._flights and self._flights[0].landing.done():
            if saved and self._flights[0].landing.exception():
                break  # raised by the next call, after the saves before it are reported
            saved.append(self._flights.popleft().landed())
        return saved

    def close(self) -> list[Saved]:
        self._thread.shutdown()
        self._capture.helpers.shutdown()
        self._images.clear()
        self._raise_failure()
        return self.finished()

    def _raise_failure(self) -> None:
        for flight in self._flights:
            if flight.landing.done() and (failure := flight.landing.exception()):
                self._flights.remove(flight)
                raise failure

    def _make_ready(
        self, reserved: list[Image], count: int, layout: PayloadLayout, device: torch.device | None
    ) -> None:
        """Allocate the memory of each image, in the thread, before a save takes it."""
        # The saves in flight have landed: their images that are too small make room for others.
        for image in [*reserved, *self._images.reserve(layout.length, count)]:
            try:
                make_ready(image, layout, device)
            finally:
                self._images.give_back(image)

    def _write(
        self, draft: Draft, image: Image, layout: PayloadLayout, departures: list[Departure], ready: Ready
    ) -> tuple[_Written, float, float]:
        """Write the draft in the thread; return the result and the seconds of the device's capture and of the writing."""
        try:
            device = sum(departure.wait() for departure in departures)
            start = perf_counter()
            written = self._target.write(draft, lambda: [image.bytes[: layout.length].data], ready)
            return written, device, perf_counter() - start
        finally:
            self._images.give_back(image)
