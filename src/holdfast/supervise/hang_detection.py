"""Whether a worker is stuck: how long it may go without progress, and of those that others wait for, which it is.

Pure: what each look at the workers shows comes in, and whoever is stuck comes out.

To restart for nothing is dear, so deadlines are long. Where a run recovers live a false alarm costs a share of one
step, so a worker is soon given up that others are seen to wait for, and that neither comes further nor computes; should
it have been slow and not stuck, the next one has twice the time.

Which workers the others wait for. Pure: what one look at them shows comes in, and those that keep the rest come out.

A worker that waits for a peer has passed more boundaries, or begun more exchanges, than the peer: whoever is furthest
behind is waited for. Where members were lost, those that are left wait for whoever has not come to find together.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from holdfast.progress import Phase

Place = tuple[int, int]  # boundaries passed, exchanges begun since


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLook:
    """What one look at a running worker shows."""

    seat: int  # which worker of this node it is: no two of an attempt have the same
    boundaries: int = 0
    posted: int = 0
    moved: int = 0
    evaluated: int = 0
    phase: Phase = Phase.STARTING
    stopped: bool = False
    asleep: bool = True  # it neither computes, nor stands in line for a processor, nor waits for a disk
    is_member: bool = True  # others train with it, or are about to; else it is in reserve

    @property
    def place(self) -> Place:
        return self.boundaries, self.posted


@dataclass(frozen=True, slots=True)
class RemoteProgress:
    """How far the workers of other nodes are: the place of the last of them, and the bytes that all have moved."""

    place: Place | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Awaited:
    """Workers of which one keeps the others, if all of them are overdue; `surely` if others are seen to wait."""

    workers: Sequence[WorkerLook]
    surely: bool = False


def awaited(workers: Sequence[WorkerLook], elsewhere: Place | None) -> list[Awaited]:
    """Those that may keep the others, as far as places and phases tell; nobody waits for one that is ready in reserve."""
    members = [each for each in workers if each.is_member and each.phase is not Phase.ENDED]
    coming = [each for each in workers if not each.is_member and each.phase not in (Phase.JOINING, Phase.ENDED)]
    found = [Awaited([each]) for each in coming]
    if any(each.phase is Phase.RECOVERING for each in members):
        return [*found, *_finding_together(members, bool(coming))]
    return [*found, *_behind([each for each in members if each.phase is not Phase.JOINING], elsewhere)]


def _finding_together(members: list[WorkerLook], some_come: bool) -> Iterator[Awaited]:
    """Members were lost, or others join: whoever is not there is waited for, however far it is."""
    there = (Phase.RECOVERING, Phase.JOINING)
    absent = [each for each in members if each.phase not in there]
    if absent:
        yield from (Awaited([each], surely=True) for each in absent)
    elif not some_come:  # they may wait for a replacement, which has a deadline of its own
        yield Awaited(sorted(members, key=lambda each: (each.phase is Phase.RECOVERING, each.seat)))


def _behind(members: list[WorkerLook], elsewhere: Place | None) -> Iterator[Awaited]:
    """Of several that are equally far nobody knows who waits for whom, and one that still works may be the one."""
    if not members:
        return
    last = min(each.place for each in members)
    if elsewhere is not None and elsewhere < last:
        return  # all of ours wait for a worker of another node, and that node will say so
    ahead = (elsewhere is not None and elsewhere > last) or any(each.place > last for each in members)
    behind = sorted((each for each in members if each.place == last), key=lambda each: each.seat)
    yield Awaited(behind, surely=ahead)


LEAST, TIMES = 300.0, 20.0  # what is learned: so many times the longest step, and never less than so many seconds
GENEROUS = 6.0  # for starts, restores and saves, and for a worker that computes
STOPPED = 30.0
SOON = 1.5  # where a run recovers live: for the stopped, and for the idle that others wait for
FOUND_WITHIN = 30.0  # for members to find together, or a worker to be let in, while nothing moves
BUSY = 0.05  # of one core
LONGEST_LOOK = 0.5
SETTLED = 2  # boundaries: the step between the first two may compile
REMEMBERED = 64  # looks that a usual step is learned from

Processor = Callable[[int], float | None]  # seconds of processor time that a worker has used, if that can be known


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that will come no further by itself, and why we think so."""

    seat: int
    because: str


class Judge:
    """Watches the workers of one node; what it learns of their steps stays from attempt to attempt."""

    def __init__(self, hang_timeout: float | None, *, live: bool = False) -> None:
        self._given, self._live = hang_timeout, live
        self._longest = 0.0
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._soon = SOON
        self._watches: dict[int, _Watch] = {}

    def begin(self) -> None:
        """Other workers come: forget those that were."""
        self._watches = {}

    def forgive(self) -> None:
        """Members were lost or join: whoever waited for them has time anew."""
        for watch in self._watches.values():
            watch.awaited, watch.used = 0.0, None

    def look(
        self, workers: Sequence[WorkerLook], now: float, processor: Processor, elsewhere: RemoteProgress
    ) -> list[Stuck]:
        """Whoever is stuck, judged by all looks so far."""
        moved = elsewhere.moved + sum(each.moved for each in workers)
        several = awaited(workers, elsewhere.place)
        some_run = not all(each.stopped for each in workers)
        none_stopped = not any(each.stopped for each in workers)  # else whoever is idle may wait for one that is
        surely = {each.seat for some in several if some.surely and none_stopped for each in some.workers}
        for each in workers:
            watch = self._watches.setdefault(each.seat, _Watch(now))
            self._learn(each, watch.look(each, moved, now, is_awaited=each.seat in surely, others_run=some_run))
        return self._stopped(workers) or self._overdue(several, processor)

    def idle(self, seat: int) -> float:
        """For how long this worker has made no progress."""
        return self._watches[seat].idle if seat in self._watches else 0.0

    def overdue(self, worker: WorkerLook, processor: Processor) -> bool:
        """Whether a worker has gone without progress for too long; one whose script has ended, without going."""
        watch = self._watches.get(worker.seat)
        return watch is not None and watch.idle > self._deadline(worker, watch, processor)

    @property
    def step(self) -> float:
        """How long a step may take."""
        return self._given if self._given is not None else max(LEAST, TIMES * self._longest)

    @property
    def soon(self) -> float | None:
        """How long a worker may be idle while others wait for it; nothing where that has no deadline of its own."""
        if not self._live or self._given is not None or not self._steps:
            return None
        return max(self._soon, TIMES * median_low(self._steps))

    def _learn(self, worker: WorkerLook, gap: tuple[float, int] | None) -> None:
        """So many steps took so long. The longest may hide an evaluation or a recovery; a usual one does not."""
        if gap is not None and worker.boundaries >= SETTLED:
            seconds, steps = gap
            self._steps.append(seconds / steps)
            if worker.boundaries > SETTLED:
                self._longest = max(self._longest, seconds)

    def _stopped(self, workers: Sequence[WorkerLook]) -> list[Stuck]:
        """Those that stand still; where all do, somebody may have meant it, and has more time to let them go on."""
        found = []
        for each in workers:
            watch, limit = self._watches[each.seat], self._given or STOPPED
            seconds = watch.stopped
            if self._live and self._given is None and watch.alone > SOON:
                seconds, limit = watch.alone, SOON
            if seconds > limit:
                why = f"was stopped for {seconds:.1f} s (limit {limit:g} s; change it with --hang-timeout)"
                found.append(Stuck(each.seat, why))
        return found

    def _overdue(self, several: Sequence[Awaited], processor: Processor) -> list[Stuck]:
        for some in several:
            idle = {each.seat for each in some.workers if some.surely and self._is_idle(each, processor)}
            late = [each.seat in idle or self.overdue(each, processor) for each in some.workers]
            if all(late):
                first = some.workers[0]
                return [Stuck(first.seat, self._why_soon(first) if first.seat in idle else self._why(first))]
        return []

    def _is_idle(self, worker: WorkerLook, processor: Processor) -> bool:
        """Whether it has neither come further nor computed for too long while others waited for it."""
        soon = self.soon
        return soon is not None and _is_settled(worker) and self._watches[worker.seat].is_idle(worker, soon, processor)

    def _deadline(self, worker: WorkerLook, watch: "_Watch", processor: Processor) -> float:
        """How long this worker may go without progress, if nobody knows whether others wait for it."""
        alone = self._alone(worker)
        if worker.phase in _TOGETHER or (self._given is not None and _is_settled(worker)):
            return alone  # whatever it computes: it waits by looking again and again, or the user has said how long
        watch.weigh(worker.seat, alone, processor)
        if watch.idle <= alone or not watch.is_busy(worker.seat, processor):
            return alone
        # A script that never attaches has no boundaries, nor has what comes after the loop.
        return float("inf") if worker.phase in (Phase.STARTING, Phase.DONE) else alone * GENEROUS

    def _alone(self, worker: WorkerLook) -> float:
        """The deadline of a worker that does not compute."""
        if worker.phase in _TOGETHER and self._given is None:
            return FOUND_WITHIN
        return self.step * self._factor(worker)

    def _factor(self, worker: WorkerLook) -> float:
        """How many times longer than a step the worker may take for what it is doing."""
        if _is_settled(worker):
            return 1.0
        if self._given is not None:
            return GENEROUS
        # After the loop a script may evaluate or upload, and nothing that was trained is at stake any more.
        return {Phase.DONE: GENEROUS**2, Phase.ENDED: 1.0}.get(worker.phase, GENEROUS)

    def _why(self, worker: WorkerLook) -> str:
        doing = _DOING[worker.phase] if worker.boundaries >= SETTLED else _DOING_AT_FIRST[worker.phase]
        idle = self._watches[worker.seat].idle
        return f"{doing} for {idle:.0f} s (deadline {self._alone(worker):.3g} s; change it with --hang-timeout)"

    def _why_soon(self, worker: WorkerLook) -> str:
        """Why it is given up; the next one has more time."""
        deadline, idle = self.soon, self._watches[worker.seat].awaited
        self._soon = min(2 * self._soon, LEAST)
        return (
            f"neither passed a step boundary nor computed for {idle:.1f} s while others waited for it (deadline "
            f"{deadline:.3g} s, from now on {self.soon:.3g} s; change it with --hang-timeout)"
        )


def _is_settled(worker: WorkerLook) -> bool:
    """Whether what it is doing is a step like any other."""
    return worker.phase is Phase.TRAINING and worker.boundaries >= SETTLED


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
    Phase.JOINING: "was not let in",
}
_DOING_AT_FIRST = _DOING | {
    Phase.STARTING: "did not come to its first step",
    Phase.TRAINING: "did not finish its first step",
}


class _Watch:
    """One worker from look to look."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self._seen = WorkerLook(seat=-1)
        self._moved = 0
        self._gap = 0.0
        self._weighed: tuple[float, float | None] | None = None
        self._clock = 0.0
        self.idle = self.stopped = 0.0
        self.alone = 0.0
        """For how long it was stopped while others ran."""
        self.awaited = 0.0
        """For how long others have waited for it without any sign of life."""
        self.used: tuple[float, float | None] | None = None
        """When that began, and how much of the processor it had used by then."""

    def look(
        self, seen: WorkerLook, moved: int, now: float, *, is_awaited: bool, others_run: bool
    ) -> tuple[float, int] | None:
        """Take a look into account; how long the steps took that have ended since the last one, and how many they are."""
        # A long pause between two looks counts for little: whoever stopped us may have stopped the worker, too.
        passed = min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        self._clock += passed
        before, self._seen = self._seen, seen
        self.stopped = self.stopped + passed if seen.stopped else 0.0
        self.alone = self.alone + passed if seen.stopped and others_run else 0.0
        has_moved, self._moved = moved != self._moved, moved
        if _progress(seen) != _progress(before) or (seen.phase is not Phase.TRAINING and has_moved):
            self.idle, self._weighed = 0.0, None
        else:
            self.idle += passed
        if is_awaited and seen.asleep and _signs(seen) == _signs(before):
            self.awaited += passed
        else:
            self.awaited, self.used = 0.0, None
        return self._steps(before, passed)

    def _steps(self, before: WorkerLook, passed: float) -> tuple[float, int] | None:
        self._gap = passed if before.phase in _BEFORE else self._gap + passed
        steps, gap = self._seen.boundaries - before.boundaries, self._gap
        if steps:
            self._gap = 0.0
        return (gap, steps) if steps > 0 else None

    def weigh(self, seat: int, deadline: float, processor: Processor) -> None:
        """Note how much of the processor it has used, early in a silence that may become too long."""
        if self._weighed is None and self.idle > deadline / 10:
            self._weighed = self._clock, processor(seat)

    def is_busy(self, seat: int, processor: Processor) -> bool:
        """Whether it has computed since then."""
        return self._weighed is None or self._has_computed(self._weighed, (self._clock, processor(seat)))

    def is_idle(self, worker: WorkerLook, deadline: float, processor: Processor) -> bool:
        """Whether it has been awaited for so long, and has not computed either; if it has, it is watched anew."""
        if self.awaited and self.used is None:
            self.used = self._clock, processor(worker.seat)
        if self.used is None or self.awaited <= deadline:
            return False
        now = self._clock, processor(worker.seat)
        if self._has_computed(self.used, now):
            self.awaited, self.used = 0.0, now
            return False
        return True

    def _has_computed(self, before: tuple[float, float | None], now: tuple[float, float | None]) -> bool:
        if before[1] is None or now[1] is None:
            return True  # who cannot know does not accuse
        return now[1] - before[1] >= BUSY * (now[0] - before[0])


def _progress(seen: WorkerLook) -> tuple[int, Phase, int]:
    """What must change before a deadline: an evaluation between two steps may take as long as it needs."""
    return seen.boundaries, seen.phase, seen.evaluated


def _signs(seen: WorkerLook) -> tuple[object, ...]:
    """Whatever shows that it is alive."""
    return seen.place, seen.phase, seen.moved, seen.evaluated
