"""The timeline of a run: the events of its supervisor and of rank 0, merged by time and divided into attempts.

All ranks wait for each other, so these two event files account for all of the wall clock. Their events are merged by
time or, if a clock was set back, by their order within an attempt. If rank 0 is lost and the others continue (live
recovery), the timeline continues with the lowest surviving rank.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

from holdfast import events
from holdfast.cost.step_block import Item, KnownSteps, StepBlock
from holdfast.errors import BadInput
from holdfast.events import What

RANK_0 = "rank-0"
Place = tuple[int, int]  # an attempt, and the number of its group of members


def leading(history: Sequence[Item]) -> list[Item]:
    """Return the events of rank 0, sorted by time; after its loss, the events of the lowest surviving rank."""
    files: defaultdict[str, list[Item]] = defaultdict(list)
    for event in history:
        if event.who.startswith("rank-"):
            files[event.who].append(event)
    regroups = (event.what for event in history if isinstance(event.what, events.Regroup) and event.what.members)
    first = {(regroup.attempt, regroup.number): f"rank-{min(regroup.members)}" for regroup in regroups}
    if all(who == "rank-0" for who in first.values()):
        return [e for place, e in _placed(files["rank-0"]) if place is not None] if first else files["rank-0"]
    placed = {who: list(_placed(file)) for who, file in files.items()}
    path = [
        event
        for who, file in placed.items()
        for place, event in file
        if place is not None and who == first.get(place, "rank-0")
    ]
    return sorted([*path, *_unwritten(first, placed, path)], key=lambda event: event.time)


def _placed(file: Sequence[Item]) -> Iterator[tuple[Place | None, Item]]:
    """Yield (place, event) for each event of a rank; a place is (attempt, number of the process group).

    The place is None while a new process has not joined a group yet."""
    begun: set[int] = set()
    place: Place | None = (0, 0)
    for at, event in enumerate(file):
        what = event.what
        if isinstance(what, events.Open):
            number = next((e.what.attempt for e in file[at + 1 :] if isinstance(e.what, events.Attempt)), 0)
            place = None if number in begun else (number, 0)
            begun.add(number)
        elif isinstance(what, events.Regroup):
            place = (what.attempt, what.number)
        yield place, event


def _unwritten(
    first: Mapping[Place, str], placed: Mapping[str, Sequence[tuple[Place | None, Item]]], path: Sequence[Item]
) -> Iterator[Item]:
    """Yield the steps that `path` lacks, because a killed rank did not write them itself.

    `first` has the name of the leading rank at each place, `placed` the events of each rank, and `path` the events that
    were taken so far."""
    known = KnownSteps()
    for item in path:
        if isinstance(item.what, events.Step | StepBlock):
            known.add(*_steps(item.what))
    for who in sorted({*first.values()}, key=lambda who: int(who.removeprefix("rank-"))):
        for place, item in placed.get(who, ()):
            what = item.what
            if place is None or not isinstance(what, events.Step | StepBlock):
                continue
            for start, stop in known.add(*_steps(what)):
                yield what.part(start, stop) if isinstance(what, StepBlock) else item


def _steps(what: events.Step | StepBlock) -> tuple[int, int, int]:
    """Return the attempt, the number of the first step, and the number of steps."""
    return (what.attempt, what.step, 1) if isinstance(what, events.Step) else (what.attempt, what.first, what.steps)


IN_ORDER = (events.Done, events.Stopped, events.Preempted, events.Judged)
BEGINS = (events.Open, events.Launch)
GOES_ON = (*BEGINS, events.Detect, events.Restart)
_STARTS = (events.Launch, events.Restart)
T = TypeVar("T")


class TimedEvent(NamedTuple):  # a tuple, because there is one for every step
    """An event of a run's timeline, and its time in seconds since the run began."""

    at: float
    event: Item


@dataclass(frozen=True, slots=True)
class AttemptStretch:
    """The events of the supervisor and of rank 0 during one attempt (from a start of all workers to the next)."""

    number: int
    moments: Sequence[TimedEvent]
    end: float
    kinds: Mapping[type[object], Sequence[TimedEvent]]

    @property
    def begin(self) -> float:
        return self.moments[0].at

    @property
    def verdict(self) -> str | None:
        """The supervisor's verdict on the run, such as "completed", or None if the run did not end in this attempt."""
        return next((judged.verdict for judged in self.events_of(events.Judged)), None)

    def moments_of(self, kind: type[What | StepBlock]) -> Sequence[TimedEvent]:
        """Return the events of type `kind` with their times since the run began, sorted by time."""
        return self.kinds.get(kind, ())

    def events_of(self, kind: type[T]) -> list[T]:
        return [moment.event.what for moment in self.kinds.get(kind, ()) if isinstance(moment.event.what, kind)]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of the supervisor and of rank 0 in a run, divided by attempt, on one clock."""

    stretches: tuple[AttemptStretch, ...]
    away: float  # seconds between a clean end and a continuation; no other time includes them
    clock_back: float  # seconds by which clocks were set back; no other time includes them

    @property
    def wall(self) -> float:
        return self.stretches[-1].end


def timeline(history: Sequence[Item]) -> Timeline:
    """Put the events of the supervisor and of rank 0 in `history` on one clock, and divide them by attempt."""
    path = _in_order((_supervising(history), _sorted_by_end(leading(history))))
    if not path:
        raise BadInput("this history has neither a supervisor nor a rank 0: name the folder of a whole run.")
    moments, away, clock_back = _on_one_clock(path)
    parts = list(_divided(moments))
    ends = [part[0].at for part in parts[1:]] + [moments[-1].at]
    stretches = []
    for part, end in zip(parts, ends, strict=True):
        kinds: defaultdict[type[object], list[TimedEvent]] = defaultdict(list)
        for moment in part:
            kinds[type(moment.event.what)].append(moment)
        # Rank 0's number of the attempt, or the supervisor's if rank 0 never recorded one.
        numbers = (_named(moment.event) for moment in chain(kinds.get(events.Attempt, ()), part))
        number = next((number for number in numbers if number is not None), 1)
        stretches.append(AttemptStretch(number, part, end, kinds))
    return Timeline(tuple(stretches), away, clock_back)


def _supervising(history: Sequence[Item]) -> list[Item]:
    """Return the supervisor's events; with several nodes, of each attempt the events of one supervisor.

    The supervisor that restarted the workers comes before one that joined them: it knows why. A supervisor that only
    waited for other nodes took no part in the run. If the clocks of the nodes differ, one supervisor tells all."""
    files: defaultdict[str, list[Item]] = defaultdict(list)
    for event in history:
        if re.fullmatch(r"supervisor(-\d+)?", event.who):
            files[event.who].append(event)
    if len(files) < 2:
        return next(iter(files.values()), [])
    attempts: defaultdict[int, dict[str, list[Item]]] = defaultdict(dict)
    for who in sorted(files):
        for session in _sessions(files[who]):
            if any(isinstance(event.what, _STARTS) for event in session):
                for number, event in _numbered(session):
                    attempts[number].setdefault(who, []).append(event)
    path = [event for number in sorted(attempts) for event in min(attempts[number].values(), key=_joined)]
    in_order = bool(path) and all(a.time <= b.time for a, b in pairwise(path))
    return path if in_order else files[min(files)]


def _sessions(file: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the events of each process that wrote to `file`."""
    session: list[Item] = []
    for event in file:
        if session and isinstance(event.what, events.Open):
            yield session
            session = []
        session.append(event)
    yield session


def _joined(attempt: Iterable[Item]) -> bool:
    return not any(isinstance(event.what, events.Restart) for event in attempt)


def _sorted_by_end(file: Sequence[Item]) -> list[Item]:
    """Return the events of a file in the order in which they happened, because a step may be written late."""
    path: list[Item] = []
    for event in file:
        place = len(path)
        while isinstance(event.what, events.Step | StepBlock) and place:
            before = path[place - 1]
            if not isinstance(before.what, events.Save | events.Commit | events.Regroup) or before.time <= event.time:
                break
            place -= 1
        path.insert(place, event)
    return path


def _in_order(files: tuple[list[Item], list[Item]]) -> list[Item]:
    if all(a.time <= b.time for file in files for a, b in pairwise(file)):
        return list(heapq.merge(*files, key=lambda event: event.time))

    def place(row: tuple[int, Item]) -> tuple[int, int]:
        number, event = row
        by_supervisor = 0 if isinstance(event.what, events.Open | events.Launch | events.Restart) else 2
        return number, 1 if event.who.startswith("rank-") else by_supervisor

    numbered = [row for file in files for row in _numbered(file)]
    return [event for _, event in sorted(numbered, key=place)]


def _numbered(file: Sequence[Item]) -> Iterator[tuple[int, Item]]:
    """Yield (attempt, event) for each event. An event without an attempt gets the attempt of a neighbouring event."""
    following = [_named(event) for event in file[1:]] + [None]
    last = 1
    for event, after in zip(file, following, strict=False):
        last = _named(event) or (after if isinstance(event.what, events.Open) else None) or last
        yield last, event


def _named(event: Item) -> int | None:
    return getattr(event.what, "attempt", None)


def _on_one_clock(path: Sequence[Item]) -> tuple[list[TimedEvent], float, float]:
    now = away = clock_back = 0.0
    over = False
    moments: list[TimedEvent] = []
    for before, event in pairwise([path[0], *path]):
        passed = event.time - before.time
        if passed < 0:
            clock_back -= passed
        elif over and isinstance(event.what, BEGINS):
            away += passed
        else:
            now += passed
        moments.append(TimedEvent(now, event))
        over = isinstance(event.what, IN_ORDER) or (over and not isinstance(event.what, GOES_ON))
    return moments, away, clock_back


def _divided(moments: Iterable[TimedEvent]) -> Iterator[list[TimedEvent]]:
    part: list[TimedEvent] = []
    launched: int | None = None  # the number of the attempt, once its supervisor has launched it
    has_joined = has_failed = False  # a rank has started; a failure was detected
    for moment in moments:
        event, is_rank = moment.event, moment.event.who.startswith("rank-")
        is_launch = isinstance(event.what, events.Launch | events.Restart)
        if isinstance(event.what, events.Open):
            is_over = has_joined or (not is_rank and launched is not None)
        else:
            is_over = is_launch and (has_failed or launched not in (None, _named(event)))
        if is_over:
            yield part
            part, launched, has_joined, has_failed = [], None, False, False
        part.append(moment)
        if is_rank:
            has_joined = has_joined or isinstance(event.what, events.Open)
        elif is_launch:
            launched = _named(event)
        elif isinstance(event.what, events.Detect):
            has_failed = True
    yield part
