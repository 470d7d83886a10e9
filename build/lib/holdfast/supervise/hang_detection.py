"""Decides which workers hang: how long each may go without progress, and which one keeps the others waiting. No I/O.

A worker that waits for a peer has passed more step boundaries, or begun more collectives, than that peer. An unnecessary
restart is expensive, so deadlines are long. With live recovery a false alarm costs only a part of one step. So there, an
idle worker that other workers wait for has a shorter deadline, which doubles each time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from holdfast.progress import Phase

LEAST, TIMES = 300.0, 20.0  # the learned deadline of a step: TIMES the longest one, at least LEAST seconds
GENEROUS = 6.0  # factor for starts, restores and saves, and for a worker that computes
STOPPED = 30.0
STOP_WITHIN = 60.0  # seconds without progress that a worker has after a stop signal
SOON = 1.5  # with live recovery: for suspended workers, and for idle ones that others wait for
FOUND_WITHIN = 30.0  # seconds for members to recover, or a worker to join, while nothing moves
BUSY = 0.05  # of one core
LONGEST_LOOK = 0.5
SETTLED = 2  # boundaries: the step between the first two may compile
REMEMBERED = 64  # looks from which a usual step is learned

Place = tuple[int, int]  # boundaries passed, collectives begun since
Processor = Callable[[int], float | None]  # seconds of processor time that a seat has used, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLook:
    """The observed progress of a running worker at one moment."""

    seat: int  # which worker of this node it is: no two of an attempt have the same
    boundaries: int = 0  # finished steps
    posted: int = 0  # collectives begun since
    moved: int = 0  # bytes transferred
    evaluated: int = 0  # grows while the worker evaluates its model
    phase: Phase = Phase.STARTING
    stopped: bool = False  # suspended by a signal
    asleep: bool = True  # neither computes, nor waits for a processor or a disk
    is_member: bool = True  # others train with it, or are about to; otherwise it is in reserve
    has_done_peers: bool = False  # another worker of its attempt has ended in order

    @property
    def place(self) -> Place:
        """The worker's position as (steps finished, collectives begun since then); a larger tuple is further ahead."""
        return self.boundaries, self.posted


class RemoteProgress(NamedTuple):
    """The progress of other nodes: the position of their slowest worker, and the number of bytes transferred."""

    place: Place | None = None
    moved: int = 0


class Hang(NamedTuple):
    """A worker that hangs, by its process number `seat`, and the reason why it counts as hung."""

    seat: int
    because: str


class AwaitedWorkers(NamedTuple):
    """Workers that other workers wait for: certainly if `surely` is True, otherwise possibly.

    If all of these `workers` exceed their deadlines, the first worker counts as hanging."""

    workers: Sequence[WorkerLook]
    surely: bool = False


def awaited(workers: Sequence[WorkerLook], remote: Place | None) -> list[AwaitedWorkers]:
    """Return groups of `workers` that others may wait for. `remote` is the position of the slowest remote worker."""
    members = [worker for worker in workers if worker.is_member and worker.phase is not Phase.ENDED]
    coming = [worker for worker in workers if not worker.is_member and worker.phase not in (Phase.JOINING, Phase.ENDED)]
    groups = [AwaitedWorkers([worker]) for worker in coming]
    if any(worker.phase is Phase.RECOVERING for worker in members):
        return [*groups, *_absent(members, bool(coming))]
    return [*groups, *_behind([worker for worker in members if worker.phase is not Phase.JOINING], remote)]


def _absent(members: list[WorkerLook], replacements_start: bool) -> Iterator[AwaitedWorkers]:
    there = (Phase.RECOVERING, Phase.JOINING)
    absent = [worker for worker in members if worker.phase not in there]
    if absent:
        yield from (AwaitedWorkers([worker], surely=True) for worker in absent)
    elif not replacements_start:  # otherwise they may wait for a replacement, which has a deadline of its own
        yield AwaitedWorkers(sorted(members, key=lambda worker: (worker.phase is Phase.RECOVERING, worker.seat)))


def _behind(members: list[WorkerLook], remote: Place | None) -> Iterator[AwaitedWorkers]:
    if not members:
        return
    last = min(worker.place for worker in members)
    if remote is not None and remote < last:
        return  # all of ours wait for a worker of another node, which will report it
    ahead = (remote is not None and remote > last) or any(worker.place > last for worker in members)
    behind = sorted((worker for worker in members if worker.place == last), key=lambda worker: worker.seat)
    yield AwaitedWorkers(behind, surely=ahead)


class HangDetector:
    """A detector of hanging workers on one node.

    `timeout` is the deadline of a step in seconds, or None to learn it from earlier steps. `live` is True if a lost
    worker is replaced without a restart."""

    def __init__(self, timeout: float | None, *, live: bool = False) -> None:
        self._timeout, self._live = timeout, live
        self._longest = 0.0
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._soon = SOON
        self._watches: dict[int, _Watch] = {}

    def begin(self) -> None:
        """Forget all workers, because they have exited. Keep the learned step times."""
        self._watches = {}

    def reset_idle(self) -> None:
        """Set the idle time of every worker to 0, because the workers now wait for something else.

        They were asked to stop, for example, or one that they had waited for is lost."""
        for watch in self._watches.values():
            watch.idle = 0.0

    def is_late_to_stop(self, worker: WorkerLook) -> bool:
        within = max(STOP_WITHIN, 2 * self._longest)
        return self.idle(worker.seat) > within * (GENEROUS if worker.phase in _SAVING else 1.0)

    def reset_waits(self) -> None:
        """Set the time that others have waited for each worker to 0, because the group of members has changed."""
        for watch in self._watches.values():
            watch.awaited, watch.used = 0.0, None

    def look(
        self, workers: Sequence[WorkerLook], now: float, processor: Processor, remote: RemoteProgress
    ) -> list[Hang]:
        """Return the workers that hang, judged by their progress since earlier calls.

        `processor` returns the CPU seconds that the worker process with a given number `seat` has used."""
        moved = remote.moved + sum(worker.moved for worker in workers)
        groups = awaited(workers, remote.place)
        some_run = not all(worker.stopped for worker in workers)
        none_stopped = not any(worker.stopped for worker in workers)  # otherwise an idle one may wait for that one
        surely = {worker.seat for group in groups if group.surely and none_stopped for worker in group.workers}
        for worker in workers:
            watch = self._watches.setdefault(worker.seat, _Watch(now))
            self._learn(worker, watch.look(worker, moved, now, is_awaited=worker.seat in surely, others_run=some_run))
        return self._suspended(workers) or self._overdue(groups, processor)

    def idle(self, seat: int) -> float:
        """Return the seconds since the last progress of the worker with the process number `seat`."""
        return self._watches[seat].idle if seat in self._watches else 0.0

    def is_overdue(self, worker: WorkerLook, processor: Processor) -> bool:
        watch = self._watches.get(worker.seat)
        return watch is not None and watch.idle > self._deadline(worker, watch, processor)

    @property
    def step(self) -> float:
        """The deadline of one step in seconds, set by the user or learned."""
        return self._timeout if self._timeout is not None else max(LEAST, TIMES * self._longest)

    @property
    def soon(self) -> float | None:
        """The shorter deadline, in seconds, of an idle worker that others wait for; None if only the long one applies."""
        if not self._live or self._timeout is not None or not self._steps:
            return None
        return max(self._soon, TIMES * median_low(self._steps))

    def _learn(self, worker: WorkerLook, gap: tuple[float, int] | None) -> None:
        if gap is not None and worker.boundaries >= SETTLED:
            seconds, steps = gap
            self._steps.append(seconds / steps)
            if worker.boundaries > SETTLED:
                self._longest = max(self._longest, seconds)

    def _suspended(self, workers: Sequence[WorkerLook]) -> list[Hang]:
        hangs = []
        for worker in workers:
            watch, limit = self._watches[worker.seat], self._timeout or STOPPED
            seconds = watch.stopped
            if self._live and self._timeout is None and watch.alone > SOON:
                seconds, limit = watch.alone, SOON
            if seconds > limit:
                why = f"was suspended for {seconds:.1f} s (limit {limit:g} s; change it with --hang-timeout)"
                hangs.append(Hang(worker.seat, why))
        return hangs

    def _overdue(self, groups: Sequence[AwaitedWorkers], processor: Processor) -> list[Hang]:
        for group in groups:
            idle: set[int] = set()  # workers that neither made progress nor computed for too long, while others waited
            if group.surely and (soon := self.soon) is not None:
                settled = filter(_is_settled, group.workers)
                idle = {w.seat for w in settled if self._watches[w.seat].is_idle(w, soon, processor)}
            if all(worker.seat in idle or self.is_overdue(worker, processor) for worker in group.workers):
                first = group.workers[0]
                return [Hang(first.seat, self._why_soon(first) if first.seat in idle else self._why(first))]
        return []

    def _deadline(self, worker: WorkerLook, watch: "_Watch", processor: Processor) -> float:
        idle_deadline = self._idle_deadline(worker)
        if worker.phase in _TOGETHER or (self._timeout is not None and _is_settled(worker)):
            return idle_deadline  # computing or not: it waits by polling, or the user has set the limit
        if not watch.is_busy(worker.seat, idle_deadline, processor):
            return idle_deadline
        # A script that never attaches has no boundaries, nor has the part after the loop.
        return float("inf") if worker.phase in (Phase.STARTING, Phase.DONE) else idle_deadline * GENEROUS

    def _idle_deadline(self, worker: WorkerLook) -> float:
        if worker.phase in _TOGETHER and self._timeout is None:
            return FOUND_WITHIN
        if _is_settled(worker):
            return self.step
        if self._timeout is not None:
            return self.step * GENEROUS
        if worker.phase is Phase.STARTING and worker.has_done_peers:
            return self.step  # it may hang at its end, waiting for a peer that has gone
        # After the loop a script may evaluate or upload, and nothing that was trained can be lost any more.
        return self.step * {Phase.DONE: GENEROUS**2, Phase.ENDED: 1.0}.get(worker.phase, GENEROUS)

    def _why(self, worker: WorkerLook) -> str:
        doing = _DOING[worker.phase] if worker.boundaries >= SETTLED else _DOING_AT_FIRST[worker.phase]
        idle = self._watches[worker.seat].idle
        if worker.phase is Phase.STARTING and worker.has_done_peers:
            doing = "neither computed nor ended after its peers had ended"
        return f"{doing} for {idle:.0f} s (deadline {self._idle_deadline(worker):.3g} s; change it with --hang-timeout)"

    def _why_soon(self, worker: WorkerLook) -> str:
        deadline, idle = self.soon, self._watches[worker.seat].awaited
        self._soon = min(2 * self._soon, LEAST)
        return (
            f"neither passed a step boundary nor computed for {idle:.1f} s while others waited for it (deadline "
            f"{deadline:.3g} s, from now on {self.soon:.3g} s; change it with --hang-timeout)"
        )


def _is_settled(worker: WorkerLook) -> bool:
    return worker.phase is Phase.TRAINING and worker.boundaries >= SETTLED


_SAVING = (Phase.SAVING, Phase.CLOSING)
_BEFORE = (Phase.STARTING, Phase.RESTORING, Phase.JOINING)
_TOGETHER = (Phase.RECOVERING, Phase.JOINING)
_DOING = {
    Phase.STARTING: "passed no step boundary",
    Phase.RESTORING: "restored nothing",
    Phase.TRAINING: "passed no step boundary",
    Phase.SAVING: "saved nothing",
    Phase.CLOSING: "saved nothing more",
    Phase.DONE: "did nothing after its last step",
    Phase.ENDED: "did not end",
    Phase.RECOVERING: "found no group",
    Phase.JOINING: "could not join",
}
_DOING_AT_FIRST = _DOING | {
    Phase.STARTING: "did not come to its first step",
    Phase.TRAINING: "did not finish its first step",
}


class _Watch:
    def __init__(self, now: float) -> None:
        self._looked = now
        self._last = WorkerLook(seat=-1)
        self._moved = 0
        self._gap = 0.0
        self._measured: tuple[float, float | None] | None = None  # clock and processor time, early in a silence
        self._clock = 0.0
        self.idle = self.stopped = 0.0
        self.alone = 0.0  # seconds that the worker was suspended while others ran
        self.awaited = 0.0  # seconds that others have waited for the worker without any sign of life
        self.used: tuple[float, float | None] | None = None  # clock and CPU time when `awaited` began to count

    def look(
        self, worker: WorkerLook, moved: int, now: float, *, is_awaited: bool, others_run: bool
    ) -> tuple[float, int] | None:
        """Record the progress of `worker`. If it has finished steps, return the seconds they took, and their number.

        `moved` counts the bytes that all workers transferred. `others_run` is False if all workers are suspended."""
        # A long pause between two looks counts for little: the worker may have been suspended together with us.
        passed = min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        self._clock += passed
        before, self._last = self._last, worker
        self.stopped = self.stopped + passed if worker.stopped else 0.0
        self.alone = self.alone + passed if worker.stopped and others_run else 0.0
        has_moved, self._moved = moved != self._moved, moved
        if _progress(worker) != _progress(before) or (worker.phase is not Phase.TRAINING and has_moved):
            self.idle, self._measured = 0.0, None
        else:
            self.idle += passed
        if is_awaited and worker.asleep and _signs(worker) == _signs(before):
            self.awaited += passed
        else:
            self.awaited, self.used = 0.0, None
        self._gap = passed if before.phase in _BEFORE else self._gap + passed
        steps, gap = worker.boundaries - before.boundaries, self._gap
        if steps:
            self._gap = 0.0
        return (gap, steps) if steps > 0 else None

    def is_busy(self, seat: int, deadline: float, processor: Processor) -> bool:
        """Return True if the worker made no progress for over `deadline` seconds, but used CPU time.

        `processor` returns the CPU seconds that the worker with the process number `seat` has used."""
        if self._measured is None and self.idle > deadline / 10:
            self._measured = self._clock, processor(seat)
        if self.idle <= deadline:
            return False
        return self._measured is None or _has_computed(self._measured, (self._clock, processor(seat)))

    def is_idle(self, worker: WorkerLook, deadline: float, processor: Processor) -> bool:
        """Return True if others waited over `deadline` seconds for `worker`, and it used no CPU time meanwhile.

        `processor` returns the CPU seconds that a worker has used."""
        if self.awaited and self.used is None:
            self.used = self._clock, processor(worker.seat)
        if self.used is None or self.awaited <= deadline:
            return False
        now = self._clock, processor(worker.seat)
        if _has_computed(self.used, now):
            self.awaited, self.used = 0.0, now
            return False
        return True


def _has_computed(before: tuple[float, float | None], now: tuple[float, float | None]) -> bool:
    if before[1] is None or now[1] is None:
        return True  # unknown: assume that it did
    return now[1] - before[1] >= BUSY * (now[0] - before[0])


def _progress(worker: WorkerLook) -> tuple[int, Phase, int]:
    return worker.boundaries, worker.phase, worker.evaluated  # an evaluation may take as long as it needs


def _signs(worker: WorkerLook) -> tuple[object, ...]:
    return worker.place, worker.phase, worker.moved, worker.evaluated
