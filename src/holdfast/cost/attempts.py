"""The attempts of a run as its history shows them: steps, saves, live recoveries, and how and when each attempt ended.

A failure begins with its `failure` event if it was injected, otherwise with the last event of rank 0 before it. A failure
that the other workers survive does not end the attempt; the first surviving rank then takes rank 0's place here.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from holdfast import events
from holdfast.cost.timeline import Moment, Stretch
from holdfast.errors import BadInput
from holdfast.events import JSON, Commit, Detect, Done, Event, Judged, Malformed, Preempted, Regroup, Stopped, Strike
from holdfast.faults.schedule import ENDING
from holdfast.history.lineage import Lineage
from holdfast.stall import Stall


class StepCost(NamedTuple):
    """A step of rank 0: when it began and ended, and its seconds without live recoveries inside it."""

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
    """A live recovery: when it ended, on the run's clock and by the wall, and whether its step was rolled back later."""

    at: float
    time: float
    regroup: Regroup
    rolled_back: bool


class StruckFailure(NamedTuple):
    """An injected failure, and the event that recorded it."""

    strike: Strike
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """A save: how long training waited for each part of it, and after how long it was durable, if ever."""

    attempt: int
    step: int
    writer: str
    bytes: int
    retries: int
    stall: Stall
    durable_after: float | None

    def to_json(self) -> dict[str, JSON]:
        """Return the save as one flat row."""
        row = asdict(self)
        stall = row.pop("stall")
        return {**row, **stall, "unaccounted": self.stall.unaccounted}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimeline:
    """One attempt. `stop` is where its failure begins, otherwise where its stretch ends."""

    stretch: Stretch
    steps: Sequence[StepCost]
    regroups: Sequence[Regrouped]
    saves: Sequence[SaveCost]
    committed: int
    after_failure: bool
    ended: str | None
    struck: StruckFailure | None  # the injected failure that ended it
    stop: float

    @property
    def failed(self) -> bool:
        return self.ended == "failed"

    @property
    def first(self) -> float:
        """The start of its first step; without a step, where it stopped or was done."""
        if self.steps:
            return self.steps[0].begin
        ends = (moment.at for kind in (Done, Stopped, Preempted) for moment in self.stretch.moments_of(kind))
        return min([self.stop, *ends])


def attempts(stretches: Sequence[Stretch], history: Iterable[Event]) -> list[AttemptTimeline]:
    """Read each attempt from its stretch of the critical path and from the injected failures of all ranks."""
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
                regroups=[
                    Regrouped(at, event.time, event.what, event.what.step >= lineage.limit(event.what.attempt))
                    for at, event in stretch.moments_of(Regroup)
                    if isinstance(event.what, Regroup)
                ],
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
    """Return the injected failures, whichever process recorded them."""
    return [StruckFailure(event.what, event) for event in history if isinstance(event.what, Strike)]


def verdict(stretch: Stretch) -> str | None:
    """Return the supervisor's verdict on the run, if `stretch` has it."""
    return next((judged.verdict for judged in stretch.events_of(Judged)), None)


def moment_of(event: Event, stretch: Stretch) -> float:
    """Place an event of another file on the run's clock, relative to rank 0's last step."""
    anchor = (stretch.moments_of(events.Step) or stretch.moments[:1])[-1]
    return anchor.at + max(0.0, event.time - anchor.event.time)


def _read(stretches: Iterable[Stretch]) -> tuple[Lineage, list[int]]:
    """Return the lineage of the run, and the number of committed steps at the end of each stretch."""
    lineage, counts = Lineage(), list[int]()
    for stretch in stretches:
        for event in (moment.event for moment in stretch.moments):
            if isinstance(event.what, Malformed):
                line = f", line {event.what.line} of its file," if event.what.line else ""
                which = f"a {event.kind} event of {event.who}{line}"
                raise BadInput(f"{which} cannot be read ({event.what.why}): the cost is unknown.")
            lineage.add(event.what)
        counts.append(lineage.committed)
    return lineage, counts


def _steps(stretch: Stretch, lineage: Lineage) -> list[StepCost]:
    steps: list[StepCost] = []
    before = stretch.begin
    recovered: list[tuple[float, float]] = []  # live recoveries since the last step: their end, and their seconds
    for at, event in stretch.moments:
        if not event.who.startswith("rank-"):
            continue
        if isinstance(event.what, events.Step):
            data, compute, stall, device = event.what.seconds
            begin = max(before, at - data - compute - stall)
            within = sum(max(0.0, min(seconds, end - (at - compute))) for end, seconds in recovered)
            rolled_back = event.what.step >= lineage.limit(event.what.attempt)
            number, alone = event.what.step, max(0.0, compute - within)
            steps.append(StepCost(number, begin, at, data, alone, stall, device, rolled_back))
            recovered = []
        if isinstance(event.what, Regroup):
            recovered.append((at, event.what.seconds))
        elif not isinstance(event.what, events.Save | Commit):  # a stall is part of the step that waited
            before = at
    return steps


def fatal(stretch: Stretch) -> list[Moment]:
    """Return the failures that the supervisor detected, without those of members whose loss the others survived."""
    survived = _survived(stretch)
    moments: list[Moment] = []
    for moment in stretch.moments_of(Detect):
        rank = moment.event.what.rank if isinstance(moment.event.what, Detect) else -1
        if survived[rank] > 0:
            survived[rank] -= 1
        else:
            moments.append(moment)
    return moments


def _survived(stretch: Stretch) -> Counter[int]:
    """Count how often the loss of each member was survived by the others."""
    return Counter(member for regroup in stretch.events_of(Regroup) for member in regroup.lost)


def _saves(stretch: Stretch) -> list[SaveCost]:
    durable = {commit.step: commit.seconds for commit in stretch.events_of(Commit)}
    return [
        SaveCost(
            attempt=stretch.number,
            step=save.step,
            writer=save.writer,
            bytes=save.bytes,
            retries=save.retries,
            stall=save.seconds,
            durable_after=durable.get(save.step),
        )
        for save in stretch.events_of(events.Save)
    ]


def _fatal(
    failures: Iterable[StruckFailure], steps: Sequence[StepCost], survived: Counter[int]
) -> StruckFailure | None:
    """Return the first failure that the attempt did not survive.

    After a failure at a step boundary that is survived, its step is trained. Inside a step or a save, other workers may
    continue for a while; there every lost process ends the attempt, unless its peers survived the loss.
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
    """Return how the attempt ended, or None if it is still running or its end was not recorded."""
    judged = verdict(stretch)
    detected = bool(fatal(stretch))
    if stretch.moments_of(Preempted) or (judged == "preempted" and not detected):
        return "preempted"
    # A worker may crash while it exits. It counts as a failure if the supervisor restarted because of it.
    done = bool(stretch.moments_of(Done) or stretch.moments_of(Stopped))
    if judged == "completed" or (done and (is_last or not detected)):
        return "completed"
    return "failed" if judged or detected or not is_last else None


def _stop(stretch: Stretch, steps: Sequence[StepCost], struck: StruckFailure | None) -> float:
    """Return where the failure begins: after rank 0's last step, and before the failure was detected."""
    detected = min((moment.at for moment in fatal(stretch)), default=stretch.end)
    done = steps[-1].end if steps else stretch.begin
    if struck is not None:
        began = moment_of(struck.event, stretch)
    else:
        written = (m.at for m in stretch.moments if m.event.who.startswith("rank-") and m.at <= detected)
        began = max(written, default=detected)
    return max(done, min(began, detected))
