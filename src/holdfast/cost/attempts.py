"""What each attempt of a run did, what became of it, and where on the clock it stopped: a history, read once.

A failure begins with its `failure` event; one that nobody injected, with the last that rank 0 said before it. One that
the others survived live ends no attempt: rank 0 is then whoever was the first of them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from holdfast import events
from holdfast.cost.timeline import Moment, Stretch
from holdfast.errors import BadInput
from holdfast.events import JSON, Commit, Detect, Done, Event, Judged, Malformed, Preempted, Regroup, Stopped, Strike
from holdfast.faults.schedule import ENDING
from holdfast.history.lineage import Lineage
from holdfast.stall import Stall


class StepCost(NamedTuple):
    """A step of rank 0: where on the clock it began and ended, and the seconds it took, but for a live recovery in it."""

    number: int
    begin: float
    end: float
    data: float
    compute: float
    stall: float
    device: bool
    rolled_back: bool

    @property
    def work(self) -> float:
        return self.data + self.compute


class Regrouped(NamedTuple):
    """A live recovery: where on the clock it ended, when that was, and whether its window was rolled back later."""

    at: float
    time: float
    regroup: Regroup
    rolled_back: bool


class StruckFailure(NamedTuple):
    """A failure of the schedule, and when and by whom it was put on record."""

    strike: Strike
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """A save: how long training waited for it and for what, and after how long it was durable, if ever."""

    attempt: int
    step: int
    writer: str
    bytes: int
    retries: int
    stall: Stall
    durable_after: float | None

    def to_json(self) -> dict[str, JSON]:
        """The save as one flat row."""
        row = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "stall"}
        return {**row, **asdict(self.stall), "unaccounted": self.stall.unaccounted}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimeline:
    """One life of the workers. `stop` is where its failure begins, or else where its stretch ends."""

    stretch: Stretch
    steps: Sequence[StepCost]
    regroups: Sequence[Regrouped]
    saves: Sequence[SaveCost]
    committed: int
    after_failure: bool
    ended: str | None
    struck: StruckFailure | None  # the injected failure that nothing was trained after
    stop: float

    @property
    def failed(self) -> bool:
        return self.ended == "failed"

    @property
    def first(self) -> float:
        """Where its first step begins; where it stops, or is done with nothing left to do, if it came to none."""
        if self.steps:
            return self.steps[0].begin
        return min(
            [self.stop, *(moment.at for kind in (Done, Stopped, Preempted) for moment in self.stretch.all(kind))]
        )


def attempts(stretches: Sequence[Stretch], history: Iterable[Event]) -> list[AttemptTimeline]:
    """Each attempt, read from its stretch of the critical path and from the failures that all ranks tell of."""
    failures: defaultdict[int, list[StruckFailure]] = defaultdict(list)
    for struck_at in strikes(history):
        failures[struck_at.strike.attempt].append(struck_at)
    lineage, committed = _read(stretches)
    read: list[AttemptTimeline] = []
    for stretch, so_far in zip(stretches, committed, strict=True):
        steps = _steps(stretch, lineage)
        struck = _fatal(failures[stretch.number], steps, _survived(stretch))
        ended = _ended(stretch, is_last=stretch is stretches[-1])
        read.append(
            AttemptTimeline(
                stretch=stretch,
                steps=steps,
                regroups=[_regrouped(moment, lineage) for moment in stretch.all(Regroup)],
                saves=_saves(stretch),
                committed=so_far,
                after_failure=bool(read) and read[-1].failed,
                ended=ended,
                struck=struck,
                stop=_stop(stretch, steps, struck) if ended == "failed" else stretch.end,
            )
        )
    return read


def strikes(history: Iterable[Event]) -> list[StruckFailure]:
    """The failures that were injected, whoever put them on record."""
    return [StruckFailure(event.what, event) for event in history if isinstance(event.what, Strike)]


def verdict(stretch: Stretch) -> str | None:
    """The supervisor's verdict on the run, if this stretch has it."""
    return next((judged.verdict for judged in stretch.told(Judged)), None)


def moment_of(event: Event, stretch: Stretch) -> float:
    """Where an event of another file lies on the clock: as long after rank 0's last step as the two clocks say."""
    anchor = (stretch.all(events.Step) or stretch.moments[:1])[-1]
    return anchor.at + max(0.0, event.time - anchor.event.time)


def _read(stretches: Iterable[Stretch]) -> tuple[Lineage, list[int]]:
    """What counts at last, and how many steps were committed by the end of each stretch."""
    lineage, counts = Lineage(), list[int]()
    for stretch in stretches:
        for event in (moment.event for moment in stretch.moments):
            if isinstance(event.what, Malformed):
                line = f", line {event.what.line} of its file," if event.what.line else ""
                raise BadInput(
                    f"a {event.kind} event of {event.who}{line} cannot be read ({event.what.why}): no cost follows."
                )
            lineage.add(event.what)
        counts.append(lineage.committed)
    return lineage, counts


def _steps(stretch: Stretch, lineage: Lineage) -> list[StepCost]:
    steps: list[StepCost] = []
    before = stretch.begin
    recovered: list[tuple[float, float]] = []  # where live recoveries since the last step ended, and what they took
    for at, event in stretch.moments:
        if not event.who.startswith("rank-"):
            continue
        if isinstance(event.what, events.Step):
            steps.append(_step(event.what, at, before, lineage, recovered))
            recovered = []
        if isinstance(event.what, Regroup):
            recovered.append((at, event.what.seconds))
        elif not isinstance(event.what, events.Save | Commit):  # a stall is part of the step that waited
            before = at
    return steps


def _step(
    what: events.Step, at: float, before: float, lineage: Lineage, recovered: Iterable[tuple[float, float]]
) -> StepCost:
    data, compute, stall, device = what.seconds
    begin = max(before, at - data - compute - stall)
    within = sum(max(0.0, min(seconds, end - (at - compute))) for end, seconds in recovered)
    rolled_back = what.step >= lineage.limit(what.attempt)
    return StepCost(what.step, begin, at, data, max(0.0, compute - within), stall, device, rolled_back)


def _regrouped(moment: Moment, lineage: Lineage) -> Regrouped:
    what = moment.event.what
    assert isinstance(what, Regroup)
    return Regrouped(moment.at, moment.event.time, what, what.step >= lineage.limit(what.attempt))


def fatal(stretch: Stretch) -> list[Moment]:
    """The failures that a supervisor saw in an attempt, without those of members that the others went on without."""
    survived = _survived(stretch)
    found: list[Moment] = []
    for moment in stretch.all(Detect):
        rank = moment.event.what.rank if isinstance(moment.event.what, Detect) else -1
        if survived[rank] > 0:
            survived[rank] -= 1
        else:
            found.append(moment)
    return found


def _survived(stretch: Stretch) -> Counter[int]:
    """How often each member was lost, and the others went on."""
    return Counter(member for regroup in stretch.told(Regroup) for member in regroup.lost)


def _saves(stretch: Stretch) -> list[SaveCost]:
    durable = {commit.step: commit.seconds for commit in stretch.told(Commit)}
    return [_save(save, stretch.number, durable) for save in stretch.told(events.Save)]


def _save(save: events.Save, attempt: int, durable: Mapping[int, float | None]) -> SaveCost:
    return SaveCost(
        attempt=attempt,
        step=save.step,
        writer=save.writer,
        bytes=save.bytes,
        retries=save.retries,
        stall=save.seconds,
        durable_after=durable.get(save.step),
    )


def _fatal(
    failures: Iterable[StruckFailure], steps: Sequence[StepCost], survived: Counter[int]
) -> StruckFailure | None:
    """The first failure that the attempt did not survive.

    One that strikes at a boundary is followed by its own step if it is survived. Inside a step, or in a save, others may
    train on for a while: there every process that is lost ends the attempt, unless its peers went on without it.
    """
    trained = steps[-1].number if steps else -1
    for failure in sorted(failures, key=lambda failure: (failure.event.time, failure.event.who)):
        strike = failure.strike
        if strike.kind in ENDING and survived[strike.rank] > 0:
            survived[strike.rank] -= 1
        elif strike.step > trained or (strike.point != "boundary" and strike.kind in ENDING):
            return failure
    return None


def _ended(stretch: Stretch, *, is_last: bool) -> str | None:
    """What became of it. None: it goes on, or nobody said."""
    judged = verdict(stretch)
    detected = bool(fatal(stretch))
    if stretch.all(Preempted) or (judged == "preempted" and not detected):
        return "preempted"
    # A worker may still crash on its way out. If that made the supervisor restart, it was a failure.
    if judged == "completed" or ((stretch.all(Done) or stretch.all(Stopped)) and (is_last or not detected)):
        return "completed"
    return "failed" if judged or detected or not is_last else None


def _stop(stretch: Stretch, steps: Sequence[StepCost], struck: StruckFailure | None) -> float:
    """Where the failure begins: never before rank 0's last step was done, nor after the failure was detected."""
    detected = min((moment.at for moment in fatal(stretch)), default=stretch.end)
    done = steps[-1].end if steps else stretch.begin
    began = _last_word(stretch.moments, detected) if struck is None else moment_of(struck.event, stretch)
    return max(done, min(began, detected))


def _last_word(moments: Sequence[Moment], until: float) -> float:
    return max((each.at for each in moments if each.event.who.startswith("rank-") and each.at <= until), default=until)
