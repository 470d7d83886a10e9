"""What every rank of a run did, when, on one clock: trained, waited for a save, started or recovered, and what failed."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from holdfast import events
from holdfast.cost.attempts import AttemptTimeline, attempts
from holdfast.cost.timeline import Stretch, timeline
from holdfast.events import Commit, Detect, Event, Regroup, Strike
from holdfast.history.lineage import Lineage
from holdfast.report.thinning import Piece, Point

# In the order in which they are drawn: what comes later is drawn over what came before.
KINDS = ("train", "undone", "wait", "recover")


class Mark(NamedTuple):
    """Something that happened at one moment: to which rank, before which step, and what."""

    at: float
    rank: int
    step: int
    text: str


class Line(NamedTuple):
    """How far training came over time, for a while; `kept` is false for what a failure undid."""

    kept: bool
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Activity:
    """A run on its own clock, in seconds from its beginning to `wall`."""

    wall: float
    reached: int
    trained: int
    lanes: Mapping[int, Sequence[Piece]]
    lines: Sequence[Line]
    saves: Sequence[Mark]
    failures: Sequence[Mark]


def activity(history: Sequence[Event]) -> Activity:
    """What the ranks of the run with this history did."""
    line = timeline(history)
    lives = attempts(line.stretches, history)
    clock, lineage = _Clock(line.stretches), _lineage(line.stretches)
    files: defaultdict[int, list[Event]] = defaultdict(list)
    for event in history:
        if event.who.startswith("rank-") and event.who.removeprefix("rank-").isdigit():
            files[int(event.who.removeprefix("rank-"))].append(event)
    return Activity(
        wall=line.wall,
        reached=max((step.number + 1 for life in lives for step in life.steps), default=0),
        trained=sum(len(life.steps) for life in lives),
        lanes={rank: list(_lane(files[rank], clock, lineage)) for rank in sorted(files)},
        lines=[each for life in lives for each in _lines(life)],
        saves=_saves(history, clock),
        failures=_failures(history, clock),
    )


class _Clock:
    """Where an event lies on the clock of the run: as long after the beginning of its attempt as its own clock says."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = {stretch.number: stretch for stretch in stretches}

    def at(self, event: Event) -> float | None:
        """None for an event of an attempt that the critical path does not know."""
        stretch = self._stretches.get(getattr(event.what, "attempt", -1))
        if stretch is None:
            return None
        since = event.time - stretch.moments[0].event.time
        return min(max(stretch.begin + since, stretch.begin), stretch.end)

    def begin(self, attempt: int) -> float:
        return self._stretches[attempt].begin


def _lineage(stretches: Sequence[Stretch]) -> Lineage:
    lineage = Lineage()
    for stretch in stretches:
        for moment in stretch.moments:
            lineage.add(moment.event.what)
    return lineage


def _lane(told: Sequence[Event], clock: _Clock, lineage: Lineage) -> Iterator[Piece]:
    """What one rank did. Where it says nothing it was not there, or waited for others."""
    now, begun, trains = 0.0, set[int](), False
    for event in told:
        what, at = event.what, clock.at(event)
        if at is None:
            continue
        match what:
            case events.Attempt(attempt=attempt):
                now, trains = (
                    (clock.begin(attempt) if attempt not in begun else at),
                    False,
                )  # else it joins in the middle
                begun.add(attempt)
            case Regroup(seconds=seconds):
                begin = max(now, at - seconds)
                yield from _piece(now, begin, "train" if trains else "recover")
                yield from _piece(begin, at, "recover")
                now = at
            case events.Step(attempt=attempt, step=step, seconds=took):
                begin = max(now, at - took.data - took.compute)
                waited = max(now, begin - took.stall)
                yield from _piece(now, now if trains else waited, "recover")
                yield from _piece(waited, begin, "wait")
                yield from _piece(begin, at, "undone" if step >= lineage.limit(attempt) else "train")
                now, trains = max(now, at), True
            case _:
                pass


def _piece(begin: float, end: float, kind: str) -> Iterator[Piece]:
    if end > begin:
        yield Piece(begin, end, kind)


def _lines(life: AttemptTimeline) -> Iterator[Line]:
    for undone, steps in groupby(life.steps, key=lambda step: step.rolled_back):
        some = list(steps)
        first: Point = (some[0].begin, some[0].number)
        yield Line(not undone, [first, *((step.end, step.number + 1) for step in some)])


def _saves(history: Sequence[Event], clock: _Clock) -> list[Mark]:
    """Snapshots from the moment on at which they existed, whoever saved them."""
    found = [
        Mark(at, int(event.who.removeprefix("rank-")), event.what.step, "snapshot")
        for event in history
        if isinstance(event.what, Commit) and not event.what.found and event.who.startswith("rank-")
        if (at := clock.at(event)) is not None
    ]
    return sorted(found)


def _failures(history: Sequence[Event], clock: _Clock) -> list[Mark]:
    """Failures as a supervisor saw them; those that were injected and that no supervisor saw, as they struck."""
    seen: dict[tuple[int, int], Mark] = {}
    marks: list[Mark] = []
    for event in history:
        what, at = event.what, clock.at(event)
        if isinstance(what, Detect) and at is not None and what.rank >= 0 and what.kind != "peer":
            mark = Mark(at, what.rank, what.step or 0, what.signal or what.kind)
            marks.append(mark)
            seen[what.attempt, what.rank] = mark
    for event in history:
        what, at = event.what, clock.at(event)
        if isinstance(what, Strike) and at is not None and (what.attempt, what.rank) not in seen:
            marks.append(Mark(at, what.rank, what.step, what.kind))
    return sorted(marks)
