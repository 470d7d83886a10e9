"""The cost of a run: its wall clock by cause, by save and by failure, computed from its event files.

Every second is assigned to a cause. The time before the first step of an attempt is `startup`, or `recovery` after a
failure. The time after the last step of a run is `closing`. Steps, saves and live recoveries record their own seconds.
The remaining time is `unaccounted`; it is negative if something was measured twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from holdfast.cost.attempts import (
    AttemptTimeline,
    LiveRecoveryEnd,
    SaveCost,
    StepCost,
    StruckFailure,
    attempts,
    fatal,
    moment_of,
    strikes,
)
from holdfast.cost.timeline import TimedEvent, timeline
from holdfast.events import Attempt as Began
from holdfast.events import Detect, Event, Recover, Step, Strike, rank_of
from holdfast.stall import Stall

# In the order of display. `PARTS` are the parts of the stall of a save.
PARTS = ("snapshot", "enqueue", "backpressure", "write", "sync")
CAUSES = ("compute", *PARTS, "recovery", "rework", "data", "startup", "closing", "unaccounted")
Seconds = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """The cost of one failure; all times are in seconds."""

    attempt: int
    step: int
    kind: str | None  # None if it was not injected
    rank: int | None
    ended_attempt: bool | None  # None if the history ends too early to know
    detected: str | None = None  # None if no supervisor detected it
    detection: float | None = None
    restart: float | None = None
    restore: float | None = None  # the part of `restart` in which the snapshot was read
    parts: Mapping[str, float] = field(default_factory=dict)  # of the time until the end of the next step, on rank 0
    recovery: float = 0.0  # from the failure to the next step, or to form a new group in a live recovery
    to_first_step: float | None = None  # from the failure to the end of the next step
    rework_steps: int = 0
    rework: float = 0.0  # to repeat `rework_steps` steps
    samples_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCost:
    """The cost of one attempt, by cause."""

    attempt: int
    world: int | None
    ended: str | None  # None if it still runs or its end was not recorded
    restored: int | None  # step of the restored snapshot
    steps: int
    rolled_back: int  # steps that a later restore undid
    committed: int
    wall: float
    seconds: Seconds

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        seconds = row.pop("seconds")
        return {**row, **seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The seconds that rank 0 waited for ranks that began a step late, and the rank that caused most of them.

    The rank that computes for the shortest time in a step is taken as late: the others wait for it in their first
    collective. `compute` and `rework` include these seconds."""

    seconds: float
    share: float
    rank: int | None
    rank_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """The cost of a run. `seconds` has the seconds of each cause, which add up to `wall`."""

    ended: str | None
    wall: float
    away: float  # seconds between an end of the run and its continuation
    clock_back: float  # seconds by which clocks were set back
    committed: int
    trained: int
    rolled_back: int
    samples_lost: int  # in live recoveries, unless they were rolled back
    restarts: int
    seconds: Seconds
    stall: Stall
    saves: tuple[SaveCost, ...]
    failures: tuple[FailureCost, ...]
    attempts: tuple[AttemptCost, ...]
    waiting: Waiting | None
    device: bool  # compute times were measured on the device, not at kernel launch

    @property
    def goodput(self) -> float:
        return _share(self.committed, self.wall)

    @property
    def share(self) -> Seconds:
        """The fraction of the wall clock that each cause of time took; the fractions add up to 1."""
        return {cause: _share(seconds, self.wall) for cause, seconds in self.seconds.items()}

    @property
    def stall_per_save(self) -> float:
        """The mean seconds that training waited for a save, or 0 without saves."""
        return self.stall.waited / len(self.saves) if self.saves else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "ended": self.ended,
            "goodput": self.goodput,
            "wall": self.wall,
            "away": self.away,
            "clock_back": self.clock_back,
            "restarts": self.restarts,
            "steps": {
                "committed": self.committed,
                "trained": self.trained,
                "rolled_back": self.rolled_back,
                "uncommitted": max(0, self.trained - self.rolled_back - self.committed),
            },
            "samples_lost": self.samples_lost,
            "rework": {"steps": self.rolled_back, "seconds": self.seconds["rework"]},
            "seconds": dict(self.seconds),
            "share": self.share,
            "stall": {
                **asdict(self.stall),
                "unaccounted": self.stall.unaccounted,
                "saves": len(self.saves),
                "per_save": self.stall_per_save,
            },
            "waiting": asdict(self.waiting) if self.waiting else None,
            "device": self.device,
            "saves": [save.to_json() for save in self.saves],
            "failures": [asdict(failure) for failure in self.failures],
            "attempts": [attempt.to_json() for attempt in self.attempts],
        }


def cost_breakdown(history: Sequence[Event]) -> CostBreakdown:
    """Compute the cost of the run with the events `history`, up to the last event."""
    line = timeline(history)
    timelines = attempts(line.stretches, history)
    costs = tuple(_attempt_cost(attempt) for attempt in timelines)
    return CostBreakdown(
        ended=line.stretches[-1].verdict or (None if timelines[-1].failed else timelines[-1].ended),
        wall=line.wall,
        away=line.away,
        clock_back=line.clock_back,
        committed=timelines[-1].committed,
        trained=sum(cost.steps for cost in costs),
        rolled_back=sum(cost.rolled_back for cost in costs),
        samples_lost=sum(
            len(r.regroup.missing) for attempt in timelines for r in attempt.regroups if not r.rolled_back
        ),
        restarts=sum(attempt.after_failure for attempt in timelines),
        seconds={cause: sum(cost.seconds[cause] for cost in costs) for cause in CAUSES},
        stall=sum((_stall(attempt) for attempt in timelines), Stall()),
        saves=tuple(save for attempt in timelines for save in attempt.saves),
        failures=tuple(_failures(timelines, history)),
        attempts=costs,
        waiting=_waiting(timelines, history, line.wall),
        device=any(step.device for attempt in timelines for step in attempt.steps),
    )


def _attempt_cost(attempt: AttemptTimeline) -> AttemptCost:
    stretch, wall = attempt.stretch, attempt.stretch.end - attempt.stretch.begin
    bill = dict.fromkeys(CAUSES, 0.0)
    bill["recovery" if attempt.after_failure else "startup"] += attempt.first - stretch.begin
    bill["recovery"] += stretch.end - attempt.stop
    bill["recovery"] += sum(recovery.regroup.seconds for recovery in attempt.regroups)
    for step in attempt.steps:
        if step.rolled_back:
            bill["rework"] += step.work
        else:
            bill["compute"] += step.compute
            bill["data"] += step.data
    for save in attempt.saves:
        for part in PARTS:
            bill[part] += getattr(save.stall, part)
    if attempt.ended in ("completed", "preempted"):  # from the last step to the end, without the last save
        last = attempt.steps[-1] if attempt.steps else None
        waited = sum(save.stall.waited for save in attempt.saves if last and save.step > last.number)
        bill["closing"] = max(0.0, stretch.end - (last.end if last else attempt.first) - waited)
    bill["unaccounted"] = wall - sum(bill.values())
    return AttemptCost(
        attempt=stretch.number,
        world=next((began.world for began in stretch.events_of(Began)), None),
        ended=attempt.ended,
        restored=next((recover.restored for recover in stretch.events_of(Recover)), None),
        steps=len(attempt.steps),
        rolled_back=sum(step.rolled_back for step in attempt.steps),
        committed=attempt.committed,
        wall=wall,
        seconds=bill,
    )


def _stall(attempt: AttemptTimeline) -> Stall:
    """Return the total stall of the saves of an attempt, including saves that it never finished."""
    total = sum((save.stall for save in attempt.saves), Stall())
    if not attempt.steps:
        return total
    recorded = sum(save.stall.waited for save in attempt.saves if save.step <= attempt.steps[-1].number)
    return total + Stall(waited=max(0.0, sum(step.stall for step in attempt.steps) - recorded))


def _failures(timelines: Sequence[AttemptTimeline], history: Sequence[Event]) -> list[FailureCost]:
    on_path = {id(moment.event) for attempt in timelines for moment in attempt.stretch.moments_of(Detect)}
    elsewhere = [event for event in history if isinstance(event.what, Detect) and id(event) not in on_path]
    following = [*pairwise(timelines), (timelines[-1], None)]
    costs: list[FailureCost] = []
    known = {id(attempt.struck.event) for attempt in timelines if attempt.failed and attempt.struck}
    last = timelines[-1].struck if timelines[-1].ended is None else None
    for attempt, after in following:
        struck = [strike for strike in strikes(history) if strike.strike.attempt == attempt.stretch.number]
        survived = _survived(attempt, struck, known)
        if attempt.failed:
            costs.append(_merge_failed_recovery(_ending_failure(attempt, after, elsewhere), survived))
        costs += survived
    for strike, event in strikes(history):
        if id(event) not in known:
            ended = None if last and event is last.event else False
            costs.append(
                FailureCost(
                    attempt=strike.attempt, step=strike.step, kind=strike.kind, rank=_rank(strike), ended_attempt=ended
                )
            )
    return sorted(costs, key=lambda cost: (cost.attempt, cost.step, cost.ended_attempt is True, cost.rank or 0))


def _ending_failure(attempt: AttemptTimeline, after: AttemptTimeline | None, elsewhere: Iterable[Event]) -> FailureCost:
    """Return the cost of the failure that ended `attempt`. `elsewhere` has the detections by other nodes."""
    seen, seen_at = _detection(attempt, elsewhere)
    until = after.first if after else attempt.stretch.end
    new = after.steps[0] if after and after.steps else None
    lost = [step for step in attempt.steps if step.rolled_back]
    restores = [recover.seconds for recover in after.stretch.events_of(Recover)] if after else []
    strike = attempt.struck.strike if attempt.struck else None
    return FailureCost(
        attempt=attempt.stretch.number,
        step=strike.step if strike else attempt.steps[-1].number + 1 if attempt.steps else attempt.committed,
        kind=strike.kind if strike else None,
        rank=_rank(strike or seen),
        ended_attempt=True,
        detected=seen.kind if seen else None,
        detection=None if seen_at is None else seen_at - attempt.stop,
        restart=until - (attempt.stop if seen_at is None else seen_at) if new else None,
        restore=restores[0] if restores else None,
        parts=_restart_parts(attempt, seen_at, after, new) if after and new and seen_at is not None else {},
        recovery=until - attempt.stop,
        to_first_step=new.end - attempt.stop if new else None,
        rework_steps=len(lost),
        rework=sum((step.work for step in lost), 0.0),
    )


def _restart_parts(
    attempt: AttemptTimeline, seen_at: float, after: AttemptTimeline, first: StepCost
) -> dict[str, float]:
    """Return the seconds of each part of a restart on rank 0, from the failure of `attempt` to its `first` new step."""
    began = next((moment.at for moment in after.stretch.moments_of(Began)), None)
    recover = next(iter(after.stretch.events_of(Recover)), None)
    if began is None or recover is None or recover.built is None:
        return {}
    moments = {
        "notice": seen_at,
        "start": began,
        "model": began + recover.built,
        "restore": began + recover.built + recover.seconds,
        "first batch": first.end - first.compute - first.stall,
        "first step": first.end,
    }
    return {
        part: end - begin
        for (part, end), begin in zip(moments.items(), (attempt.stop, *moments.values()), strict=False)
    }


def _merge_failed_recovery(ending: FailureCost, survived: list[FailureCost]) -> FailureCost:
    if ending.detected != "peer" or ending.kind is not None or not survived or survived[-1].step < ending.step - 1:
        return ending
    lost = survived.pop()
    return replace(
        ending, step=lost.step, kind=lost.kind, rank=lost.rank, detected=lost.detected, detection=lost.detection
    )


def _survived(attempt: AttemptTimeline, struck: Iterable[StruckFailure], known: set[int]) -> list[FailureCost]:
    """Return the cost of each loss that others survived; add the `id()` of failures that caused one to `known`."""
    costs: list[FailureCost] = []
    detects = list(attempt.stretch.moments_of(Detect))
    for recovery in attempt.regroups:
        costs += [_lost(attempt, recovery, member, struck, detects, known) for member in recovery.regroup.lost]
        if costs:
            place = -max(1, len(recovery.regroup.lost))
            seconds = costs[place].recovery + recovery.regroup.seconds
            samples = costs[place].samples_lost + len(recovery.regroup.missing)
            costs[place] = replace(costs[place], recovery=seconds, samples_lost=samples)
    return costs


def _lost(
    attempt: AttemptTimeline,
    at: LiveRecoveryEnd,
    member: int,
    struck: Iterable[StruckFailure],
    detects: list[TimedEvent],
    known: set[int],
) -> FailureCost:
    new = (failure for failure in struck if failure.strike.rank == member and id(failure.event) not in known)
    strike = next((failure for failure in new if failure.strike.step <= at.regroup.step + 1), None)
    seen = next((moment for moment in detects if getattr(moment.event.what, "rank", None) == member), None)
    if strike:
        known.add(id(strike.event))
    if seen:
        detects.remove(seen)
    begin = at.at - at.regroup.seconds
    if strike:
        begin = min(begin, at.at - max(0.0, at.time - strike.event.time))
    after = next((step for step in attempt.steps if step.number >= at.regroup.step), None)
    what = seen.event.what if seen else None
    return FailureCost(
        attempt=attempt.stretch.number,
        step=at.regroup.step,
        kind=strike.strike.kind if strike else None,
        rank=member,
        ended_attempt=False,
        detected=what.kind if isinstance(what, Detect) else None,
        detection=max(0.0, seen.at - begin) if seen else None,
        to_first_step=after.end - begin if after else None,
    )


def _detection(attempt: AttemptTimeline, elsewhere: Iterable[Event]) -> tuple[Detect | None, float | None]:
    """Return the first detection of the failure that ended `attempt`, and its seconds since the run began, if any."""
    here = fatal(attempt.stretch)
    numbers = {detect.attempt for detect in attempt.stretch.events_of(Detect)} or {attempt.stretch.number}
    places = [(moment.at, moment.event) for moment in here] + [(moment_of(e, attempt.stretch), e) for e in elsewhere]
    detects = [(at, e.who, e.what) for at, e in places if isinstance(e.what, Detect) and e.what.attempt in numbers]
    if not detects:
        return None, None
    # A node that only lost its peers may record that before the node that lost the worker.
    _, _, detect = min(detects, key=lambda row: (row[2].kind == "peer", row[0], row[1]))
    return detect, min(max(min(at for at, _, _ in detects), attempt.stop), attempt.stretch.end)


def _waiting(timelines: Iterable[AttemptTimeline], history: Iterable[Event], wall: float) -> Waiting | None:
    """Measure how long rank 0 waited for ranks that began steps late; return None if no other rank recorded steps."""
    shortest: dict[tuple[int, int], tuple[float, int]] = {}
    for event in history:
        if isinstance(event.what, Step) and (rank := rank_of(event.who)):
            key = event.what.attempt, event.what.step
            candidate = event.what.seconds.compute, rank
            shortest[key] = min(candidate, shortest.get(key, candidate))
    if not shortest:
        return None
    waited: defaultdict[int, float] = defaultdict(float)
    for attempt in timelines:
        for step in attempt.steps:
            compute, late = shortest.get((attempt.stretch.number, step.number), (step.compute, 0))
            waited[late] += max(0.0, step.compute - compute)
    total, longest = sum(waited.values()), max(sorted(waited), key=waited.__getitem__, default=0)
    rank = longest if total > 0 else None
    return Waiting(seconds=total, share=_share(total, wall), rank=rank, rank_seconds=waited[longest])


def _rank(what: Strike | Detect | None) -> int | None:
    return what.rank if what and what.rank >= 0 else None  # -1: of a worker on another node


def _share(part: float, wall: float) -> float:
    return part / wall if wall > 0 else 0.0
