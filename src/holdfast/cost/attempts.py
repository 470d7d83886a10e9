"""What each attempt of a run did, what became of it, and where on the clock it stopped: a history, read once.

What is read of an event, beside who wrote it and when:

    step      attempt, step, epoch, cursor, seconds {data, compute, stall}   stall: at the boundary before this step
    save      attempt, step, writer, bytes, retries, seconds {the parts of a Stall}
    commit    attempt, step, seconds                                         seconds: from the save's begin
    recover   attempt, restored, epoch, cursor, seconds                      rolls back its position and what is beyond
    failure   attempt, step, kind, rank                                      strikes at the boundary before this step
    launch, restart, detect {kind, rank}, verdict; attempt {world}, done, preempted

A failure begins with its `failure` event; one that nobody injected, with the last that rank 0 said before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from holdfast.cost.formulas import Stall
from holdfast.cost.timeline import RANK_0, Moment, Stretch
from holdfast.errors import BadInput
from holdfast.events import JSON, Event


class Step(NamedTuple):
    """A step of rank 0: where on the clock it began and ended, and the seconds it says it took."""

    number: int
    begin: float
    end: float
    data: float
    compute: float
    stall: float
    rolled_back: bool

    @property
    def work(self) -> float:
        return self.data + self.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save: how long training waited for it and for what, and after how long it was durable, if ever."""

    attempt: int
    step: int
    writer: str | None
    bytes: int
    retries: int
    stall: Stall
    durable_after: float | None

    def to_json(self) -> dict[str, JSON]:
        """The save as one flat row."""
        row = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "stall"}
        return {**row, **asdict(self.stall), "unaccounted": self.stall.unaccounted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One life of the workers. `stop` is where its failure begins, or else where its stretch ends."""

    stretch: Stretch
    steps: Sequence[Step]
    saves: Sequence[Save]
    committed: int
    after_failure: bool
    ended: str | None
    struck: Event | None  # the injected failure that nothing was trained after
    stop: float

    @property
    def failed(self) -> bool:
        return self.ended == "failed"

    @property
    def first(self) -> float:
        """Where its first step begins; where it stops, or is done with nothing left to do, if it came to none."""
        if self.steps:
            return self.steps[0].begin
        return min([self.stop, *(moment.at for kind in ("done", "preempted") for moment in self.stretch.all(kind))])


def attempts(stretches: Sequence[Stretch], history: Iterable[Event]) -> list[Attempt]:
    """Each attempt, read from its stretch of the critical path and from the failures that all ranks tell of."""
    failures: defaultdict[JSON, list[Event]] = defaultdict(list)
    for event in history:
        if event.event == "failure":
            failures[event.fields.get("attempt")].append(event)
    lost = _rolled_back(stretches)
    read: list[Attempt] = []
    for stretch, committed in zip(stretches, _committed(stretches), strict=True):
        steps = _steps(stretch, lost)
        struck = _fatal(failures[stretch.number], steps)
        ended = _ended(stretch, is_last=stretch is stretches[-1])
        read.append(
            Attempt(
                stretch=stretch,
                steps=steps,
                saves=_saves(stretch),
                committed=committed,
                after_failure=bool(read) and read[-1].failed,
                ended=ended,
                struck=struck,
                stop=_stop(stretch, steps, struck) if ended == "failed" else stretch.end,
            )
        )
    return read


def verdict(stretch: Stretch) -> str | None:
    """The supervisor's verdict on the run, if this stretch has it."""
    return next((text(moment.event, "verdict") for moment in stretch.all("verdict")), None)


def moment_of(event: Event, stretch: Stretch) -> float:
    """Where an event of another file lies on the clock: as long after rank 0's last step as the two clocks say."""
    anchor = (stretch.all("step") or stretch.moments[:1])[-1]
    return anchor.at + max(0.0, event.time - anchor.event.time)


def _steps(stretch: Stretch, lost: set[int]) -> list[Step]:
    steps: list[Step] = []
    before = stretch.begin
    for moment in stretch.moments:
        if moment.event.who != RANK_0:
            continue
        if moment.event.event == "step":
            steps.append(_step(moment, before, id(moment.event) in lost))
        if moment.event.event not in (
            "save",
            "commit",
        ):  # a stall is part of the step that waited, told before or after
            before = moment.at
    return steps


def _step(moment: Moment, before: float, rolled_back: bool) -> Step:
    at, event = moment
    data, compute, stall = seconds(event, "data"), seconds(event, "compute"), seconds(event, "stall")
    begin = max(before, at - data - compute - stall)
    return Step(whole(event, "step"), begin, at, data, compute, stall, rolled_back)


def _rolled_back(stretches: Iterable[Stretch]) -> set[int]:
    """The step events at or beyond the position that a later recover goes back to, by identity."""
    lost: set[int] = set()
    back: tuple[int, int] | None = None
    events = [moment.event for stretch in stretches for moment in stretch.moments]
    for event in reversed(events):
        if event.event == "recover" and event.fields.get("cursor") is not None:
            back = min(_position(event), back or _position(event))
        elif event.event == "step" and back is not None and _position(event) >= back:
            lost.add(id(event))
    return lost


def _committed(stretches: Iterable[Stretch]) -> list[int]:
    """How many steps were committed by the end of each; a recover takes back what it could not restore."""
    counts: list[int] = []
    count = 0
    for stretch in stretches:
        for event in (moment.event for moment in stretch.moments):
            if event.event == "commit":
                count = max(count, whole(event, "step"))
            elif event.event == "recover" and "restored" in event.fields:
                count = 0 if event.fields["restored"] is None else whole(event, "restored")
        counts.append(count)
    return counts


def _saves(stretch: Stretch) -> list[Save]:
    durable = {whole(moment.event, "step"): moment.event.fields.get("seconds") for moment in stretch.all("commit")}
    return [_save(moment.event, stretch.number, durable) for moment in stretch.all("save")]


def _save(event: Event, attempt: int, durable: Mapping[int, JSON]) -> Save:
    step = whole(event, "step")
    return Save(
        attempt=attempt,
        step=step,
        writer=text(event, "writer"),
        bytes=int(number(event.fields.get("bytes")) or 0),
        retries=int(number(event.fields.get("retries")) or 0),
        stall=Stall(**{part.name: seconds(event, part.name) for part in fields(Stall)}),
        durable_after=number(durable.get(step)),
    )


def _fatal(failures: Iterable[Event], steps: Sequence[Step]) -> Event | None:
    """The first failure that nothing was trained after: one that a run survives is followed by its own step."""
    trained = steps[-1].number if steps else -1
    last = [failure for failure in failures if whole(failure, "step") > trained]
    return min(last, key=lambda failure: (failure.time, failure.who), default=None)


def _ended(stretch: Stretch, *, is_last: bool) -> str | None:
    """What became of it. None: it goes on, or nobody said."""
    judged = verdict(stretch)
    detected = bool(stretch.all("detect"))
    if stretch.all("preempted") or (judged == "preempted" and not detected):
        return "preempted"
    # A worker may still crash on its way out. If that made the supervisor restart, it was a failure.
    if judged == "completed" or (stretch.all("done") and (is_last or not detected)):
        return "completed"
    return "failed" if judged or detected or not is_last else None


def _stop(stretch: Stretch, steps: Sequence[Step], struck: Event | None) -> float:
    """Where the failure begins: never before rank 0's last step was done, nor after the failure was detected."""
    detected = min((moment.at for moment in stretch.all("detect")), default=stretch.end)
    done = steps[-1].end if steps else stretch.begin
    began = _last_word(stretch.moments, detected) if struck is None else moment_of(struck, stretch)
    return max(done, min(began, detected))


def _last_word(moments: Sequence[Moment], until: float) -> float:
    return max((each.at for each in moments if each.event.who == RANK_0 and each.at <= until), default=until)


def _position(event: Event) -> tuple[int, int]:
    return whole(event, "epoch"), whole(event, "cursor")


def whole(event: Event, field: str) -> int:
    """A field that must be a whole number."""
    value = event.fields.get(field)
    if type(value) is not int:
        raise BadInput(f"a {event.event} event of {event.who} has no whole number {field!r}: costs cannot be told.")
    return value


def number(value: JSON) -> float | None:
    """The value if it is a number; one that was not finite is null in a history."""
    if isinstance(value, float):
        return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else None


def seconds(event: Event, part: str) -> float:
    """One of the seconds that an event tells; 0 if it does not."""
    told = event.fields.get("seconds")
    return number(told.get(part)) or 0.0 if isinstance(told, dict) else 0.0


def text(event: Event | None, field: str) -> str | None:
    """A field of an event, if both are there."""
    value = event.fields.get(field) if event else None
    return value if isinstance(value, str) else None
