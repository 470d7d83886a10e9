"""Timelines of the attempts of a run: steps, saves, live recoveries, and how and when each attempt ended.

An attempt is one launch of all workers. A failure begins with its `failure` event if it was injected, otherwise with
the last event of rank 0 before it. In a live recovery the other workers continue, and the attempt does not end.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from holdfast import events
from holdfast.cost.step_block import Item, StepBlock
from holdfast.cost.timeline import AttemptStretch, TimedEvent
from holdfast.errors import BadInput
from holdfast.events import JSON, Commit, Detect, Done, Malformed, Preempted, Regroup, Stopped, Strike
from holdfast.faults.schedule import ENDING
from holdfast.history.lineage import Lineage
from holdfast.stall import Stall


class StepCost(NamedTuple):
    """A training step of rank 0 and its duration, or several consecutive steps that are in one block.

    `begin` and `end` are in seconds since the run began; other durations are the sums of all of the steps."""

    number: int  # of the first step
    begin: float
    end: float
    data: float
    compute: float  # without live recoveries
    stall: float
    device: bool  # GPU events measured `compute`, not the CPU clock
    rolled_back: bool  # a later failure undid the steps, and they were trained again
    block: StepBlock | None = None

    @property
    def steps(self) -> int:
        return self.block.steps if self.block else 1

    @property
    def last(self) -> int:
        """The number of the last step."""
        return self.number + self.steps - 1

    @property
    def work(self) -> float:
        return self.data + self.compute


class LiveRecoveryEnd(NamedTuple):
    """The end of a live recovery, when the surviving workers continued to train without a restart."""

    at: float  # seconds since the run began
    time: float  # Unix time
    regroup: Regroup
    rolled_back: bool  # a later restore undid its step


class StruckFailure(NamedTuple):
    """A failure that was injected on purpose (a strike), and the event that recorded it."""

    strike: Strike
    event: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """The costs of the save of `step`; `durable_after` is the seconds until it was on storage, or None if never."""

    attempt: int
    step: int
    writer: str
    bytes: int
    retries: int
    stall: Stall
    durable_after: float | None

    def to_json(self) -> dict[str, JSON]:
        row = asdict(self)
        stall = row.pop("stall")
        return {**row, **stall, "unaccounted": self.stall.unaccounted}


class FoundSave(NamedTuple):
    """A save that `attempt` found in the store. Its times are unknown: rank 0 was killed before it recorded them."""

    attempt: int
    step: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimeline:
    """The steps, live recoveries and saves of one attempt, which lasts from one start of all workers to the next."""

    stretch: AttemptStretch
    steps: Sequence[StepCost]
    regroups: Sequence[LiveRecoveryEnd]
    saves: Sequence[SaveCost]
    found: Sequence[FoundSave]
    committed: int  # steps that were saved by its end
    after_failure: bool
    ended: str | None
    struck: StruckFailure | None  # the injected failure that ended the attempt
    stop: float  # time at which its failure began, or at which it ended without one

    @property
    def failed(self) -> bool:
        return self.ended == "failed"

    @property
    def first(self) -> float:
        """The start of the first step in seconds since the run began, or the attempt's end if it trained no step."""
        if self.steps:
            return self.steps[0].begin
        ends = (moment.at for kind in (Done, Stopped, Preempted) for moment in self.stretch.moments_of(kind))
        return min([self.stop, *ends])


def attempts(stretches: Sequence[AttemptStretch], history: Iterable[Item]) -> list[AttemptTimeline]:
    """Return the timeline of each attempt from its events (`stretches`) and the `history` of the whole run."""
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
                    LiveRecoveryEnd(at, event.time, event.what, event.what.step >= lineage.limit(event.what.attempt))
                    for at, event in stretch.moments_of(Regroup)
                    if isinstance(event.what, Regroup)
                ],
                saves=_saves(stretch),
                found=[FoundSave(c.attempt, c.step, c.bytes) for c in stretch.events_of(Commit) if c.found],
                committed=so_far,
                after_failure=bool(read) and read[-1].failed,
                ended=ended,
                struck=struck,
                stop=_stop(stretch, steps, struck) if ended == "failed" else stretch.end,
            )
        )
    return read


def strikes(history: Iterable[Item]) -> list[StruckFailure]:
    return [StruckFailure(event.what, event) for event in history if isinstance(event.what, Strike)]


def moment_of(event: Item, stretch: AttemptStretch) -> float:
    """Return the time of `event` in seconds since the run began. `event` must be after the last step of `stretch`."""
    lasts = [moments[-1] for kind in (events.Step, StepBlock) if (moments := stretch.moments_of(kind))]
    anchor = max(lasts, key=lambda moment: moment.at, default=stretch.moments[0])
    return anchor.at + max(0.0, event.time - anchor.event.time)


def _read(stretches: Iterable[AttemptStretch]) -> tuple[Lineage, list[int]]:
    lineage, counts = Lineage(), list[int]()
    for stretch in stretches:
        for event in (moment.event for moment in stretch.moments):
            if isinstance(event.what, Malformed):
                line = f", line {event.what.line} of its file," if event.what.line else ""
                which = f"a {event.what.kind} event of {event.who}{line}"
                raise BadInput(f"{which} cannot be read ({event.what.why}): the cost is unknown.")
            if not isinstance(event.what, StepBlock):
                lineage.add(event.what)
        counts.append(lineage.committed)
    return lineage, counts


def _steps(stretch: AttemptStretch, lineage: Lineage) -> list[StepCost]:
    steps: list[StepCost] = []
    before = stretch.begin
    recovered: list[tuple[float, float]] = []  # live recoveries since the last step: their end, and their seconds
    for at, event in stretch.moments:
        if not event.who.startswith("rank-"):
            continue
        if isinstance(event.what, StepBlock):
            steps += _of_block(event.what, at, before, recovered, lineage.limit(event.what.attempt))
            recovered = []
        if isinstance(event.what, events.Step):
            data, compute, stall, device = event.what.seconds
            begin = max(before, at - data - compute - stall)
            rolled_back = event.what.step >= lineage.limit(event.what.attempt)
            number, alone = event.what.step, max(0.0, compute - _within(recovered, at - compute))
            steps.append(StepCost(number, begin, at, data, alone, stall, device, rolled_back))
            recovered = []
        if isinstance(event.what, Regroup):
            recovered.append((at, event.what.seconds))
        elif not isinstance(event.what, events.Save | Commit):  # a stall is part of the step that waited
            before = at
    return steps


def _within(recovered: Iterable[tuple[float, float]], begin: float) -> float:
    """Return how many of the seconds of live recoveries were after `begin`."""
    return sum(max(0.0, min(seconds, end - begin)) for end, seconds in recovered)


def _of_block(
    block: StepBlock, at: float, before: float, recovered: Iterable[tuple[float, float]], limit: int
) -> Iterator[StepCost]:
    """Yield the costs of the steps of a block that ends at `at`; those from step `limit` on were rolled back."""
    times, data, compute, stall = (block.column(name) for name in ("time", "data", "compute", "stall"))
    ends = at - (times[-1] - times)
    begins = np.maximum(np.append(before, ends[:-1]), ends - data - compute - stall)
    alone = np.maximum(compute, 0.0)
    alone[0] = max(0.0, compute[0] - _within(recovered, float(ends[0] - compute[0])))
    kept = min(max(0, limit - block.first), block.steps)
    for start, stop in ((0, kept), (kept, block.steps)):
        if start < stop:
            yield StepCost(
                number=block.first + start,
                begin=float(begins[start]),
                end=float(ends[stop - 1]),
                data=float(data[start:stop].sum()),
                compute=float(alone[start:stop].sum()),
                stall=float(stall[start:stop].sum()),
                device=bool(block.column("device")[start:stop].any()),
                rolled_back=start == kept,
                block=block.part(start, stop),
            )


def fatal(stretch: AttemptStretch) -> list[TimedEvent]:
    """Return the detections of the failure that ended the attempt; failures that the run survived are left out."""
    survived = _survived(stretch)
    moments: list[TimedEvent] = []
    for moment in stretch.moments_of(Detect):
        rank = moment.event.what.rank if isinstance(moment.event.what, Detect) else -1
        if survived[rank] > 0:
            survived[rank] -= 1
        else:
            moments.append(moment)
    return moments


def _survived(stretch: AttemptStretch) -> Counter[int]:
    return Counter(member for regroup in stretch.events_of(Regroup) for member in regroup.lost)


def _saves(stretch: AttemptStretch) -> list[SaveCost]:
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
    """Return the injected failure that ended the attempt, or None.

    `survived` counts, for each rank, the failures after which the other workers continued."""
    trained = steps[-1].last if steps else -1
    for failure in sorted(failures, key=lambda failure: (failure.event.time, failure.event.who)):
        strike = failure.strike
        if strike.kind in ENDING and survived[strike.rank] > 0:
            survived[strike.rank] -= 1
        elif strike.step > trained or (strike.point != "boundary" and strike.kind in ENDING):
            return failure
    return None


def _ended(stretch: AttemptStretch, *, is_last: bool) -> str | None:
    """Return "completed", "preempted" or "failed", or None if the attempt still runs or its end was not recorded."""
    judged = stretch.verdict
    detected = bool(fatal(stretch))
    if stretch.moments_of(Preempted) or (judged == "preempted" and not detected):
        return "preempted"
    # A worker may crash while it exits. It counts as a failure if the supervisor restarted because of it.
    done = bool(stretch.moments_of(Done) or stretch.moments_of(Stopped))
    if judged == "completed" or (done and (is_last or not detected)):
        return "completed"
    return "failed" if judged or detected or not is_last else None


def _stop(stretch: AttemptStretch, steps: Sequence[StepCost], struck: StruckFailure | None) -> float:
    """Estimate when the failure that ended the attempt happened, in seconds since the run began."""
    detected = min((moment.at for moment in fatal(stretch)), default=stretch.end)
    done = steps[-1].end if steps else stretch.begin
    if struck is not None:
        began = moment_of(struck.event, stretch)
    else:
        written = (m.at for m in stretch.moments if m.event.who.startswith("rank-") and m.at <= detected)
        began = max(written, default=detected)
    return max(done, min(began, detected))
