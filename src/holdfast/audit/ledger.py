"""What of a history counts: its events read once, without what was rolled back, up to what was committed.

What is read of an event, beside who wrote it:

    plan     attempt, samples, batch, epochs, seed, config   what is to be trained
    attempt  attempt, world                                  so many ranks began
    step     attempt, step, epoch, cursor, world, samples    a rank trained its share of window `cursor` of `epoch`
    commit   attempt, step, found                            the snapshot of `step` exists from now on; `found`: since
                                                             before this attempt
    recover  attempt, restored, epoch, cursor, rng           the snapshot of step `restored` came back, and training
                                                             goes on with window `cursor` of `epoch`
    done     attempt, step                                   a rank has nothing left to train

An attempt that is not given is the first. A `recover` declares as rolled back what was trained at its position or
beyond it by earlier attempts, whichever the rank, and by its own writer before it. Order across ranks is thus told by
attempts: clocks decide only within one.
"""

import heapq
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

from holdfast.errors import BadInput, Corrupt
from holdfast.events import JSON, Event
from holdfast.geometry import Geometry, Position
from holdfast.samples import Samples


class CannotTell(Exception):
    """An event lacks what is read of it, or there is none, so there is no verdict."""


# Tuples: a long run has a step for every rank and window, and a tuple is small and made in a third of the time.
class Step(NamedTuple):
    """A rank's share of a window, trained; `samples` is None if the rank does not say which they were."""

    who: str
    attempt: int
    step: int
    at: Position
    world: int
    samples: Samples | None


class Commit(NamedTuple):
    """A snapshot that exists; if `found`, since before this attempt."""

    who: str
    attempt: int
    step: int
    found: bool
    time: float


class Recover(NamedTuple):
    """What a rank began an attempt with; `at` is None if nothing was rolled back."""

    who: str
    attempt: int
    restored: int | None
    at: Position | None
    rng: JSON
    time: float


Entry = Step | Commit | Recover
E = TypeVar("E", Step, Commit, Recover)


class Ledger:
    """What the checks of an audit read of a run, from its events in any order that keeps each writer's own."""

    def __init__(self, history: Iterable[Event]) -> None:
        self.events = 0
        self.writers: set[str] = set()
        self._entries: list[Entry] = []
        self._untold: dict[type[Entry], str] = {}  # kinds of which an event lacks something, and what
        self._others: defaultdict[str, list[Event]] = defaultdict(list)
        for event in history:
            self._take(event)

    def all(self, kind: str) -> Sequence[Event]:
        """The events of this kind: plan, attempt or done."""
        return self._others[kind]

    @cached_property
    def geometry(self) -> Geometry:
        """What is to be trained, as the first plan says."""
        if not self.all("plan"):
            raise CannotTell("no plan event says which windows to expect")
        first = self.all("plan")[0]
        try:
            return Geometry.from_json(first.fields)
        except BadInput as error:
            raise CannotTell(f"the plan of {first.who} says nothing that can be trained: {error}") from error

    @cached_property
    def recovers(self) -> Sequence[Recover]:
        """Every recover, in order."""
        return self._of(Recover)

    @cached_property
    def commits(self) -> Sequence[Commit]:
        """Every commit, in order."""
        return self._of(Commit)

    @cached_property
    def commits_and_recovers(self) -> Sequence[Commit | Recover]:
        """Both, in the order of attempts; what was found in an attempt was committed before it."""
        by_writer: defaultdict[str, list[Commit | Recover]] = defaultdict(list)
        self._must_be_told(Commit, Recover)
        for each in self._entries:
            if not isinstance(each, Step):
                by_writer[each.who].append(each)
        # As histories are merged: each writer's in their own order, even where its clock went back.
        merged = heapq.merge(*by_writer.values(), key=lambda each: each.time)
        return sorted(merged, key=lambda each: (each.attempt, not (isinstance(each, Commit) and each.found)))

    @cached_property
    def steps(self) -> Sequence[Step]:
        """The steps that no recover declares rolled back, in order."""
        return [step for step, back in self._with_backs(Step) if back is None or step.at < back.at]

    @cached_property
    def windows(self) -> Mapping[Position, Sequence[Step]]:
        """The kept steps by window, in the order of windows."""
        windows: defaultdict[Position, list[Step]] = defaultdict(list)
        for step in self.steps:
            windows[step.at].append(step)
        return {at: windows[at] for at in sorted(windows)}

    @cached_property
    def committed(self) -> int:
        """How many of the kept steps are covered by a commit: the newest that no later recover goes back behind."""
        commits = self._with_backs(Commit)
        return max((commit.step for commit, back in commits if back is None or commit.step <= back.step), default=0)

    @cached_property
    def worlds(self) -> Mapping[int, int]:
        """How many ranks each attempt had."""
        began = {attempt_of(event): number(event, "world") for event in self.all("attempt")}
        return began | {step.attempt: step.world for step in self._of(Step)}

    def world_that_saved(self, restored: int, before: int) -> int | None:
        """How many ranks saved the snapshot of this step that came back in an attempt, as far as the history tells."""
        known = [c for c in self.commits if c.step == restored and c.attempt < before + (1 if c.found else 0)]
        if not known:
            return None
        commit = max(known, key=lambda commit: (commit.attempt, not commit.found))
        if not commit.found:
            return self.worlds.get(commit.attempt)
        # Its own commit event was lost: it was saved by whoever was the last to train what it holds.
        earlier = [step for step in self._of(Step) if step.step == restored - 1 and step.attempt < commit.attempt]
        return max(earlier, key=lambda step: step.attempt).world if earlier else None

    def _take(self, event: Event) -> None:
        self.events += 1
        self.writers.add(event.who)
        if event.event not in _READERS:
            if event.event in _KEPT:
                self._others[event.event].append(event)
            return
        kind, read = _READERS[event.event]
        try:
            self._entries.append(read(event))
        except CannotTell as error:
            self._untold.setdefault(kind, str(error))

    def _must_be_told(self, *kinds: type[Entry]) -> None:
        for kind in kinds:
            if kind in self._untold:
                raise CannotTell(self._untold[kind])

    def _of(self, kind: type[E]) -> list[E]:
        self._must_be_told(kind)
        return [entry for entry in self._entries if isinstance(entry, kind)]

    def _with_backs(self, kind: type[E]) -> "list[tuple[E, _Back | None]]":
        """The entries of a kind, each with the furthest that a recover which speaks for it goes back."""
        self._must_be_told(kind)
        of_later_attempts = _Backs(self.recovers)
        by_writer: dict[str, _Back] = {}  # the furthest that this writer goes back later on
        entries: list[tuple[E, _Back | None]] = []
        for entry in reversed(self._entries):
            if isinstance(entry, kind):
                back, own = of_later_attempts.after(entry.attempt), by_writer.get(entry.who)
                entries.append((entry, min(back, own) if back and own else back or own))
            elif isinstance(entry, Recover) and (goes_back := _goes_back_to(entry)):
                by_writer[entry.who] = min(goes_back, by_writer.get(entry.who, goes_back))
        return entries[::-1]


class _Back(NamedTuple):
    """Where a recover goes back to, as a position and as a number of steps."""

    at: Position
    step: int


class _Backs:
    """The furthest that any attempt after a given one goes back."""

    def __init__(self, recovers: Iterable[Recover]) -> None:
        backs = sorted((recover.attempt, back) for recover in recovers if (back := _goes_back_to(recover)))
        self._attempts = [attempt for attempt, _ in backs]
        self._furthest = list(accumulate((back for _, back in reversed(backs)), min))[::-1]

    def after(self, attempt: int) -> _Back | None:
        place = bisect_right(self._attempts, attempt)
        return self._furthest[place] if place < len(self._furthest) else None


def _goes_back_to(recover: Recover) -> _Back | None:
    return None if recover.at is None else _Back(recover.at, recover.restored or 0)


def _step(event: Event) -> Step:
    at = Position(number(event, "epoch"), number(event, "cursor"))
    try:
        samples = Samples.from_json(event.fields.get("samples"))
    except Corrupt:
        samples = None
    return Step(sys.intern(event.who), attempt_of(event), number(event, "step"), at, number(event, "world"), samples)


def _commit(event: Event) -> Commit:
    found = event.fields.get("found") is True
    return Commit(event.who, attempt_of(event), number(event, "step"), found, event.time)


def _recover(event: Event) -> Recover:
    restored = None if event.fields.get("restored") is None else number(event, "restored")
    at = None if event.fields.get("cursor") is None else Position(number(event, "epoch"), number(event, "cursor"))
    return Recover(event.who, attempt_of(event), restored, at, event.fields.get("rng"), event.time)


_READERS: Mapping[str, tuple[type[Entry], Callable[[Event], Entry]]] = {
    "step": (Step, _step),
    "commit": (Commit, _commit),
    "recover": (Recover, _recover),
}
_KEPT = ("plan", "attempt", "done")


@cache
def rank_of(who: str) -> int | None:
    """The number of the rank that writes under this name."""
    number = who.removeprefix("rank-")
    return int(number) if who != number and number.isdecimal() else None


def attempt_of(event: Event) -> int:
    """The attempt that an event is of."""
    return number(event, "attempt") if "attempt" in event.fields else 1


def number(event: Event, field: str) -> int:
    """A field that must be a whole number."""
    value = event.fields.get(field)
    if type(value) is not int:
        raise CannotTell(f"a {event.event} event of {event.who} has no whole number {field!r}")
    return value
