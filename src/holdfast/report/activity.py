"""The activity of every rank of a run over time: training, waiting for a save, starting, recovering, and failures."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from holdfast import events
from holdfast.cost.attempts import AttemptTimeline, attempts
from holdfast.cost.step_block import StepBlock
from holdfast.cost.timeline import AttemptStretch, timeline
from holdfast.events import Commit, Corruption, Detect, Event, Regroup, Strike, rank_of
from holdfast.history.lineage import Lineage
from holdfast.report.page import Point


class TimelineBar(NamedTuple):
    """A bar in a timeline: one activity of a rank, from `begin` to `end` in seconds."""

    begin: float
    end: float
    kind: str


class TimelineMark(NamedTuple):
    """A save or failure to mark in a timeline, `at` seconds after the start of the run."""

    at: float
    rank: int
    step: int
    text: str


class Line(NamedTuple):
    """A line of (seconds, steps trained) points; `kept` is False if these steps were later rolled back."""

    kept: bool
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Activity:
    """The data of a run's timeline figure: bars for each rank, progress, saves and failures."""

    wall: float
    reached: int  # the last step plus 1
    trained: int  # steps, including repeated ones
    lanes: Mapping[int, Sequence[TimelineBar]]  # the activities of each rank
    lines: Sequence[Line]  # steps trained over time
    saves: Sequence[TimelineMark]
    failures: Sequence[TimelineMark]


def activity(history: Sequence[Event]) -> Activity:
    line = timeline(history)
    timelines = attempts(line.stretches, history)
    clock, lineage = _Clock(line.stretches), Lineage()
    for moment in (moment for stretch in line.stretches for moment in stretch.moments):
        if not isinstance(moment.event.what, StepBlock):
            lineage.add(moment.event.what)
    files: defaultdict[int, list[Event]] = defaultdict(list)
    for event in history:
        if (rank := rank_of(event.who)) is not None:
            files[rank].append(event)
    return Activity(
        wall=line.wall,
        reached=max((step.number + 1 for attempt in timelines for step in attempt.steps), default=0),
        trained=sum(len(attempt.steps) for attempt in timelines),
        lanes={rank: list(_lane(files[rank], clock, lineage)) for rank in sorted(files)},
        lines=[progress for attempt in timelines for progress in _lines(attempt)],
        saves=_saves(history, clock),
        failures=_failures(history, clock),
    )


class _Clock:
    def __init__(self, stretches: Sequence[AttemptStretch]) -> None:
        self._stretches = {stretch.number: stretch for stretch in stretches}

    def at(self, event: Event) -> float | None:
        """Return the time of `event` in seconds since the run started, or None if its attempt is not known."""
        stretch = self._stretches.get(getattr(event.what, "attempt", -1))
        if stretch is None:
            return None
        since = event.time - stretch.moments[0].event.time
        return min(max(stretch.begin + since, stretch.begin), stretch.end)

    def begin(self, attempt: int) -> float:
        return self._stretches[attempt].begin


def _lane(history: Sequence[Event], clock: _Clock, lineage: Lineage) -> Iterator[TimelineBar]:
    """Yield the timeline bars of one rank from its events. A gap is a time when the rank was absent or waited."""
    now, begun, trains = 0.0, set[int](), False
    for event in history:
        what, at = event.what, clock.at(event)
        if at is None:
            continue
        match what:
            case events.Attempt(attempt=attempt):
                # A rank that begins the same attempt again joins in the middle of it.
                now, trains = (at if attempt in begun else clock.begin(attempt)), False
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


def _piece(begin: float, end: float, kind: str) -> Iterator[TimelineBar]:
    if end > begin:
        yield TimelineBar(begin, end, kind)


def _lines(attempt: AttemptTimeline) -> Iterator[Line]:
    for undone, group in groupby(attempt.steps, key=lambda step: step.rolled_back):
        steps = list(group)
        first: Point = (steps[0].begin, steps[0].number)
        yield Line(not undone, [first, *((step.end, step.number + 1) for step in steps)])


def _saves(history: Sequence[Event], clock: _Clock) -> list[TimelineMark]:
    return sorted(
        TimelineMark(at, rank, event.what.step, "snapshot")
        for event in history
        if isinstance(event.what, Commit) and not event.what.found
        if (rank := rank_of(event.who)) is not None and (at := clock.at(event)) is not None
    )


def _failures(history: Sequence[Event], clock: _Clock) -> list[TimelineMark]:
    """Return a mark for each detected failure, and for each injected failure that was not detected."""
    seen: set[tuple[int, int]] = set()
    marks: list[TimelineMark] = []
    for event in history:
        what, at = event.what, clock.at(event)
        if isinstance(what, Corruption) and at is not None:
            marks += [TimelineMark(at, rank, what.step, "corruption") for rank in what.ranks]
            seen |= {(what.attempt, rank) for rank in what.ranks}
        elif isinstance(what, Detect) and at is not None and what.rank >= 0 and what.kind not in ("peer", "corruption"):
            marks.append(TimelineMark(at, what.rank, what.step or 0, what.signal or what.kind))
            seen.add((what.attempt, what.rank))
    for event in history:
        what, at = event.what, clock.at(event)
        if isinstance(what, Strike) and at is not None and (what.attempt, what.rank) not in seen:
            marks.append(TimelineMark(at, what.rank, what.step, what.kind))
    return sorted(marks)
