"""The lane of a rank in a timeline: how long the rank did what in each of many equally long parts of the run."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast import events
from holdfast.cost.step_block import Item, StepBlock
from holdfast.cost.timeline import AttemptStretch
from holdfast.events import Regroup
from holdfast.history.lineage import Lineage

COLUMNS = 1000  # horizontal resolution: more than a reader can tell apart
ACTIVITIES = ("train", "undone", "wait", "recover")
Times: TypeAlias = NDArray[np.float64]


class Bars(NamedTuple):
    """Periods of one activity of a rank, from `begins` to `ends` in seconds since the run began."""

    begins: Times
    ends: Times
    kind: str


class Lane:
    """The seconds of each activity of a rank in each column of a timeline of `wall` seconds."""

    def __init__(self, wall: float) -> None:
        self._edges = np.linspace(0.0, wall, COLUMNS + 1)
        self._width = wall / COLUMNS or 1.0
        self._seconds = {kind: np.zeros(COLUMNS) for kind in ACTIVITIES}
        self.shortest = math.inf  # of the bars that were added

    def add(self, bars: Bars) -> None:
        """Add bars that are sorted and do not overlap."""
        lengths = bars.ends - bars.begins
        self.shortest = min(self.shortest, float(lengths.min(initial=math.inf)))
        if not len(lengths):
            return
        first = min(max(0, int(bars.begins[0] / self._width) - 1), COLUMNS - 1)
        last = min(int(bars.ends[-1] / self._width) + 1, COLUMNS - 1)
        places = np.stack([bars.begins, bars.ends], axis=1).ravel()
        sums = np.append(0.0, np.cumsum(lengths))
        until = np.stack([sums[:-1], sums[1:]], axis=1).ravel()
        edges = self._edges[first : last + 2]
        self._seconds[bars.kind][first : last + 1] += np.diff(np.interp(edges, places, until))

    def seconds(self, kind: str) -> float:
        return float(self._seconds[kind].sum())

    def longest(self) -> NDArray[np.int64]:
        """Return the activity that takes most of the time in each column, as an index in `ACTIVITIES`; -1 for none."""
        seconds = np.stack([self._seconds[kind] for kind in ACTIVITIES])
        return np.where(seconds.any(axis=0), seconds.argmax(axis=0), -1)


class RunClock:
    """Converts times of events to seconds since the run began."""

    def __init__(self, stretches: Iterable[AttemptStretch]) -> None:
        self._stretches = {stretch.number: stretch for stretch in stretches}

    def at(self, item: Item) -> float | None:
        """Return the time of `item` in seconds since the run started, or None if its attempt is not known."""
        times = self.times(getattr(item.what, "attempt", -1), np.array([item.time]))
        return None if times is None else float(times[0])

    def times(self, attempt: int, times: Times) -> Times | None:
        stretch = self._stretches.get(attempt)
        if stretch is None:
            return None
        since = times - stretch.moments[0].event.time
        return np.clip(stretch.begin + since, stretch.begin, stretch.end)

    def begin(self, attempt: int) -> float:
        return self._stretches[attempt].begin


def bars_of(history: Iterable[Item], clock: RunClock, lineage: Lineage) -> Iterator[Bars]:
    """Yield the activities of one rank from its events. A gap is a time when the rank was absent or waited."""
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
                yield from _bars([now], [begin], "train" if trains else "recover")
                yield from _bars([begin], [at], "recover")
                now = at
            case events.Step() | StepBlock():
                yield from _of_steps(event, clock, lineage.limit(what.attempt), now, trains=trains)
                now, trains = max(now, at), True
            case _:
                pass


def _of_steps(item: Item, clock: RunClock, limit: int, now: float, *, trains: bool) -> Iterator[Bars]:
    """Yield the activities of a rank in its next steps, from `now` on; `trains` if it trained before."""
    what = item.what
    if isinstance(what, StepBlock):
        times, data, compute, stall = (what.column(name) for name in ("time", "data", "compute", "stall"))
        first, attempt = what.first, what.attempt
    else:
        assert isinstance(what, events.Step)
        times, took = np.array([item.time]), what.seconds
        data, compute, stall = np.array([[took.data], [took.compute], [took.stall]])
        first, attempt = what.step, what.attempt
    at = clock.times(attempt, times)
    assert at is not None  # its last time is known
    ends = np.maximum.accumulate(np.append(now, at))
    before = ends[:-1]
    begins = np.maximum(before, at - data - compute)
    waited = np.maximum(before, begins - stall)
    if not trains:
        yield from _bars([now], waited[:1], "recover")
    kept = max(0, limit - first)
    yield from _bars(waited, begins, "wait")
    yield from _bars(begins[:kept], at[:kept], "train")
    yield from _bars(begins[kept:], at[kept:], "undone")


def _bars(begins: Times | list[float], ends: Times | list[float], kind: str) -> Iterator[Bars]:
    """Yield the periods that are longer than nothing."""
    first, last = np.asarray(begins), np.asarray(ends)
    is_long = last > first
    if is_long.any():
        yield Bars(first[is_long], last[is_long], kind)
