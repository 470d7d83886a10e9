"""Writers of snapshots: `blocking` writes while training waits, and `overlapped` writes in a background thread.

Both retry if the storage fails. They report how long each save stalled training, once the save is durable. The wait for
other ranks is not included; the caller measures it (`Stall.sync`).
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
from holdfast.checkpoint.capture import BufferPool, HostImage, StateCapture, device_of, make_ready
from holdfast.checkpoint.device import DeviceCopy
from holdfast.checkpoint.digest import Progress, unwatched
from holdfast.checkpoint.payload import PayloadLayout
from holdfast.checkpoint.snapshot import BACKOFF, Manifest, SnapshotDraft, at_once
from holdfast.checkpoint.store import Store
from holdfast.errors import BadInput, StorageFailed
from holdfast.stall import Stall

logger = logging.getLogger(__name__)

# Images (host memory for the copy of a state) allocated in advance. One is enough if saves do not overlap.
READY = 1
READY_PINNED = 2  # for the state of a device: pinning another one during a save takes longer than the save

T = TypeVar("T")
Extra: TypeAlias = Mapping[str, Any]
Ready: TypeAlias = Callable[[], None]
More: TypeAlias = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A completed save: how long training waited (`stall`), seconds until it was durable, and removed old snapshots."""

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

    def save(
        self, step: int, tensors: State, extra: Extra, more: More = dict, ready: Ready = at_once, **position: Any
    ) -> None:
        """Start to save a state; its tensors may change after the return. Raise the error of an earlier failed save.

        `more` returns further items of `extra`; if it raises, nothing is saved. The commit waits until `ready` returns.
        `position` are the keyword arguments of `snapshot.draft`."""

    @property
    def is_busy(self) -> bool:
        """True if a save is in progress, or has completed but was not yet returned by `finished`."""

    def finished(self) -> list[Saved]:
        """Return the saves that completed since the last call; raise the error of a save that failed in all retries."""

    def close(self) -> list[Saved]:
        """Wait until all saves have ended and return those not yet returned; raise the error of a failed one."""


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
) -> Writer:
    """Return a writer whose `save` copies the state into host memory; a background thread then writes the copy.

    At most `max_inflight` copies exist at a time; further saves wait."""
    return _Overlapped(_Target(store, keep_last, tuple(backoff), progress), BufferPool(max_inflight))


@dataclass(frozen=True, slots=True)
class _Written:
    bytes: int
    retries: int
    removed: tuple[int, ...]
    durable: float
    digest: str

    def saved(self, step: int, stall: Stall, start: float) -> Saved:
        return Saved(step, self.bytes, stall, self.durable - start, self.retries, self.removed, self.digest)


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
        self, draft: SnapshotDraft, tensors: Callable[[], Iterable[memoryview | bytes]], ready: Ready
    ) -> _Written:
        """Write and commit `draft`, and delete all but the last `keep_last` snapshots.

        `tensors` returns the parts of the tensor file; it is called again for each retry."""
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
        """Call `work`, retrying if the storage fails, and return its result and the number of retries."""
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
    """A writer that makes training wait until the snapshot is durable."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._saved: list[Saved] = []

    def prepare(self, tensors: State) -> None:
        pass  # it needs no memory

    def save(
        self, step: int, tensors: State, extra: Extra, more: More = dict, ready: Ready = at_once, **position: Any
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
    step: int
    start: float
    stall: Stall
    landing: "Future[tuple[_Written, float, float]]"

    def landed(self) -> Saved:
        """Wait until the save is durable and return its measurements; raise the error of a failed save."""
        written, device, overlapped = self.landing.result()
        # A device captures the state asynchronously, so the wait of training is known only afterwards.
        stall = self.stall + Stall(waited=device, snapshot=device, overlapped=overlapped)
        return written.saved(self.step, stall, self.start)


class _Overlapped:
    """A writer that lets training continue while one background thread writes the snapshots."""

    def __init__(self, target: _Target, images: BufferPool) -> None:
        self._target, self._images = target, images
        self._capture = StateCapture()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-writer")  # low priority would delay the GIL
        self._flights: deque[_Flight] = deque()

    def prepare(self, tensors: State) -> None:
        layout, device = self._capture.layout(tensors), device_of(tensors)
        count = READY_PINNED if device else READY
        reserved = self._images.reserve(layout.length, count)  # now, because they count towards the limit
        self._thread.submit(self._make_ready, reserved, count, layout, device)

    def save(
        self, step: int, tensors: State, extra: Extra, more: More = dict, ready: Ready = at_once, **position: Any
    ) -> None:
        self._raise_failure()
        start = perf_counter()
        layout = self._capture.layout(tensors)
        laid_out = perf_counter()
        image = self._images.take(layout.length)
        taken = perf_counter()
        departures: list[DeviceCopy] = []
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
        self, reserved: list[HostImage], count: int, layout: PayloadLayout, device: torch.device | None
    ) -> None:
        # Earlier saves have completed, so their images may be free now: replace those that are too small.
        for image in [*reserved, *self._images.reserve(layout.length, count)]:
            try:
                make_ready(image, layout, device)
            finally:
                self._images.give_back(image)

    def _write(
        self, draft: SnapshotDraft, image: HostImage, layout: PayloadLayout, departures: list[DeviceCopy], ready: Ready
    ) -> tuple[_Written, float, float]:
        try:
            device = sum(departure.wait() for departure in departures)
            start = perf_counter()
            written = self._target.write(draft, lambda: [image.bytes[: layout.length].data], ready)
            return written, device, perf_counter() - start
        finally:
            self._images.give_back(image)
