"""Whether a worker is stuck: how long it may go without progress, and which of those that wait is the one waited for.

Pure: what each look at the workers shows comes in, and whoever is stuck comes out. A worker that waits for a peer in a
collective has passed more boundaries, or begun more reductions, than the peer. So only those that are furthest behind
are judged; where several are equally far, nobody knows who waits for whom, and one that still works may be the one the
others wait for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.progress import Phase

LEAST, TIMES = 300.0, 20.0  # what is learned: so many times the longest step, and never less than so many seconds
GENEROUS = 6.0  # for starts, restores and saves, and for a worker that computes
BUSY = 0.05  # of one core
LONGEST_LOOK = 1.0
SETTLED = 2  # boundaries: the step between the first two may compile

Place = tuple[int, int]  # boundaries passed, reductions begun
Processor = Callable[[int], float | None]  # seconds of processor time that a rank has used, if that can be known


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look at a running worker shows."""

    rank: int
    boundaries: int = 0
    posted: int = 0
    moved: int = 0
    phase: Phase = Phase.STARTING
    stopped: bool = False

    @property
    def place(self) -> Place:
        return self.boundaries, self.posted


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How far the workers of other nodes are: the place of the last of them, and the bytes that all have moved."""

    place: Place | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Stuck:
    """A worker that will come no further by itself, and why we think so."""

    rank: int
    because: str


class Judge:
    """Watches the workers of one node; what it learns of their steps stays from attempt to attempt."""

    def __init__(self, stuck_after: float | None, hang_after: float) -> None:
        self._given, self._hang_after = stuck_after, hang_after
        self._longest = 0.0
        self._watches: dict[int, _Watch] = {}

    def begin(self) -> None:
        """Other workers come: forget those that were."""
        self._watches = {}

    def look(self, workers: Sequence[Seen], now: float, processor: Processor, elsewhere: Elsewhere) -> Stuck | None:
        """Whoever is stuck, judged by all looks so far."""
        moved = elsewhere.moved + sum(each.moved for each in workers)
        for each in workers:
            watch = self._watches.setdefault(each.rank, _Watch(now))
            self._longest = max(self._longest, watch.look(each, moved, now))
        return self._stopped(workers) or self._behind(workers, processor, elsewhere.place)

    def idle(self, rank: int) -> float:
        """For how long this rank has made no progress."""
        return self._watches[rank].idle if rank in self._watches else 0.0

    def overdue(self, worker: Seen, processor: Processor) -> bool:
        """Whether a worker whose script has ended takes too long to go."""
        watch = self._watches.get(worker.rank)
        return watch is not None and watch.idle > self._deadline(worker, watch, processor)

    @property
    def step(self) -> float:
        """How long a step may take."""
        return self._given if self._given is not None else max(LEAST, TIMES * self._longest)

    def _stopped(self, workers: Sequence[Seen]) -> Stuck | None:
        for each in workers:
            if (seconds := self._watches[each.rank].stopped) > self._hang_after:
                why = f"was stopped for {seconds:.0f} s (limit {self._hang_after:g} s; change it with --hang-after)"
                return Stuck(each.rank, why)
        return None

    def _behind(self, workers: Sequence[Seen], processor: Processor, elsewhere: Place | None) -> Stuck | None:
        training = [each for each in workers if each.phase is not Phase.ENDED]
        if not training:
            return None
        last = min(each.place for each in training)
        if elsewhere is not None and elsewhere < last:
            return None  # all of ours wait for a worker of another node, and that node will say so
        behind = [each for each in training if each.place == last]
        for each in behind:
            watch = self._watches[each.rank]
            if watch.idle <= self._deadline(each, watch, processor):
                return None
        first = min(behind, key=lambda each: each.rank)
        return Stuck(first.rank, self._why(first))

    def _deadline(self, worker: Seen, watch: "_Watch", processor: Processor) -> float:
        """How long this worker may go without progress."""
        alone = self.step * self._factor(worker)
        if self._given is not None and _is_settled(worker):
            return alone  # taken at its word, whatever the worker computes
        watch.weigh(worker.rank, alone, processor)
        if watch.idle <= alone or not watch.is_busy(worker.rank, processor):
            return alone
        # A script that never attaches has no boundaries, nor has what comes after the loop.
        return float("inf") if worker.phase in (Phase.STARTING, Phase.DONE) else alone * GENEROUS

    def _factor(self, worker: Seen) -> float:
        """How many times longer than a step the worker may take for what it is doing."""
        if _is_settled(worker):
            return 1.0
        if self._given is not None:
            return GENEROUS
        # After the loop a script may evaluate or upload, and nothing that was trained is at stake any more.
        return {Phase.DONE: GENEROUS**2, Phase.ENDED: 1.0}.get(worker.phase, GENEROUS)

    def _why(self, worker: Seen) -> str:
        limit = self.step * self._factor(worker)
        doing = _DOING[worker.phase] if worker.boundaries >= SETTLED else _DOING_AT_FIRST[worker.phase]
        idle = self._watches[worker.rank].idle
        return f"{doing} for {idle:.0f} s (deadline {limit:g} s; change it with --stuck-after)"


def _is_settled(worker: Seen) -> bool:
    """Whether what it is doing is a step like any other."""
    return worker.phase is Phase.TRAINING and worker.boundaries >= SETTLED


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
        self._known: tuple[int, Phase] = (0, Phase.STARTING)
        self._moved = 0
        self._gap = 0.0
        self._weighed: tuple[float, float | None] | None = None
        self._clock = 0.0
        self.idle = self.stopped = 0.0

    def look(self, seen: Seen, moved: int, now: float) -> float:
        """Take a look into account; how long the step took that has ended since the last one, if one has."""
        # A long pause between two looks counts for little: whoever stopped us may have stopped the worker, too.
        passed = min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        self._clock += passed
        self._gap += passed
        self.stopped = self.stopped + passed if seen.stopped else 0.0
        gap = self._gap
        boundary = seen.boundaries != self._known[0]
        if boundary:
            self._gap = 0.0
        if (seen.boundaries, seen.phase) != self._known or (seen.phase is not Phase.TRAINING and moved != self._moved):
            self.idle, self._weighed = 0.0, None
        else:
            self.idle += passed
        self._known, self._moved = (seen.boundaries, seen.phase), moved
        return gap if boundary and seen.boundaries > SETTLED else 0.0

    def weigh(self, rank: int, deadline: float, processor: Processor) -> None:
        """Note how much of the processor it has used, early in a silence that may become too long."""
        if self._weighed is None and self.idle > deadline / 10:
            self._weighed = self._clock, processor(rank)

    def is_busy(self, rank: int, processor: Processor) -> bool:
        """Whether it has computed since then."""
        if self._weighed is None:
            return True
        (then, before), now = self._weighed, processor(rank)
        if before is None or now is None:
            return True  # who cannot know does not accuse
        return now - before >= BUSY * (self._clock - then)
