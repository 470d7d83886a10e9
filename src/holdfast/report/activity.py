"""The activity of every rank of a run over time: training, waiting for a save, starting, recovering, and failures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from holdfast.cost.attempts import AttemptTimeline, attempts
from holdfast.cost.run_events import RunEvents
from holdfast.cost.step_block import Item, StepBlock
from holdfast.cost.timeline import timeline
from holdfast.events import Commit, Corruption, Detect, Strike, rank_of
from holdfast.history.lineage import Lineage
from holdfast.report.lane import Lane, RunClock, bars_of
from holdfast.report.page import Point

MOST_LANES = 32


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
    """The data of a run's timeline figure: the lanes of its ranks, progress, saves and failures."""

    wall: float
    reached: int  # the last step plus 1
    trained: int  # steps, including repeated ones
    ranks: int
    lanes: Mapping[int, Lane]  # of the first ranks, or of those that failed
    lines: Sequence[Line]  # steps trained over time
    saves: Sequence[TimelineMark]
    failures: Sequence[TimelineMark]


def activity(run: RunEvents) -> Activity:
    """Return what the ranks of a run did. The steps of a rank are read again for its lane."""
    line = timeline(run.items)
    timelines = attempts(line.stretches, run.items)
    clock, lineage = RunClock(line.stretches), Lineage()
    for moment in (moment for stretch in line.stretches for moment in stretch.moments):
        if not isinstance(moment.event.what, StepBlock):
            lineage.add(moment.event.what)
    failures = _failures(run.items, clock)
    failed = {mark.rank for mark in failures}
    lanes = {
        rank: Lane(line.wall)
        for rank in sorted(sorted(run.ranks, key=lambda rank: (rank not in failed, rank))[:MOST_LANES])
    }
    for rank, lane in lanes.items():
        for bars in bars_of(run.of_rank(rank), clock, lineage):
            lane.add(bars)
    return Activity(
        wall=line.wall,
        reached=max((step.last + 1 for attempt in timelines for step in attempt.steps), default=0),
        trained=sum(step.steps for attempt in timelines for step in attempt.steps),
        ranks=len(run.ranks),
        lanes=lanes,
        lines=[progress for attempt in timelines for progress in _lines(attempt)],
        saves=_saves(run.items, clock),
        failures=failures,
    )


def _lines(attempt: AttemptTimeline) -> Iterator[Line]:
    for undone, group in groupby(attempt.steps, key=lambda step: step.rolled_back):
        steps = list(group)
        first: Point = (steps[0].begin, steps[0].number)
        yield Line(not undone, [first, *((step.end, step.last + 1) for step in steps)])


def _saves(history: Sequence[Item], clock: RunClock) -> list[TimelineMark]:
    return sorted(
        TimelineMark(at, rank, event.what.step, "snapshot")
        for event in history
        if isinstance(event.what, Commit) and not event.what.found
        if (rank := rank_of(event.who)) is not None and (at := clock.at(event)) is not None
    )


def _failures(history: Sequence[Item], clock: RunClock) -> list[TimelineMark]:
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
