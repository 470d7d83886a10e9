"""The cost of each failure of a run: its detection, the recovery, and the work that is done again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from holdfast.cost.attempts import AttemptTimeline, LiveRecoveryEnd, StepCost, StruckFailure, fatal, moment_of, strikes
from holdfast.cost.step_block import Item
from holdfast.cost.timeline import TimedEvent
from holdfast.events import Attempt as Began
from holdfast.events import Detect, Recover, Strike
from holdfast.faults.points import FLIP

RETURN = "return"  # the kind of a detection for a node that comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """One failure, and how many seconds its detection, the restart and the repeated steps took."""

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

    @property
    def name(self) -> str:
        """The kind of an injected failure, "not injected", or "node returned" for a restart without a failure."""
        return self.kind or ("node returned" if self.has_returned else "not injected")

    @property
    def has_returned(self) -> bool:
        """True if nothing failed: all workers restarted together with a node that came back."""
        return self.detected == RETURN and self.kind is None


def failure_costs(timelines: Sequence[AttemptTimeline], history: Sequence[Item]) -> list[FailureCost]:
    """Return the cost of every failure in `history`, injected or not, in the order of attempts and steps."""
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
            flip = _found_flip(attempt, struck)
            known |= {id(flip.event)} if flip else set()
            costs.append(_merge_failed_recovery(_ending_failure(attempt, after, elsewhere, flip), survived))
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


def _found_flip(attempt: AttemptTimeline, struck: Iterable[StruckFailure]) -> StruckFailure | None:
    """Return the first flipped bit among the injected failures `struck`, if a corruption ended `attempt`."""
    detects = (moment.event.what for moment in fatal(attempt.stretch))
    if not any(isinstance(detect, Detect) and detect.kind == "corruption" for detect in detects):
        return None
    return next((failure for failure in struck if failure.strike.kind == FLIP), None)


def _ending_failure(
    attempt: AttemptTimeline, after: AttemptTimeline | None, elsewhere: Iterable[Item], flip: StruckFailure | None
) -> FailureCost:
    """Return the cost of the failure that ended `attempt`; `after` is the next attempt, or None.

    `elsewhere` has the failure detections (`detect` events) that other nodes recorded. `flip` is the flipped bit that was
    found, if one was injected."""
    seen, seen_at = _detection(attempt, elsewhere)
    until = after.first if after else attempt.stretch.end
    new = after.steps[0] if after and after.steps else None
    lost = [step for step in attempt.steps if step.rolled_back]
    restores = [recover.seconds for recover in after.stretch.events_of(Recover)] if after else []
    struck = attempt.struck or flip
    strike = struck.strike if struck else None
    return FailureCost(
        attempt=attempt.stretch.number,
        step=strike.step if strike else attempt.steps[-1].last + 1 if attempt.steps else attempt.committed,
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
        rework_steps=sum(step.steps for step in lost),
        rework=sum((step.work for step in lost), 0.0),
    )


def _restart_parts(
    attempt: AttemptTimeline, seen_at: float, after: AttemptTimeline, first: StepCost
) -> dict[str, float]:
    """Return how many seconds each part of a restart took, or an empty dict if the parts were not recorded.

    `attempt` failed, `after` is the restarted attempt, and `first` is its first step. `seen_at` is when the failure was
    detected, in seconds since the run began."""
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
    after = next((step for step in attempt.steps if step.last >= at.regroup.step), None)
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


def _detection(attempt: AttemptTimeline, elsewhere: Iterable[Item]) -> tuple[Detect | None, float | None]:
    """Return the first detection of the failure that ended `attempt`, and its time in seconds since the run began.

    `elsewhere` has the detections that other nodes recorded."""
    here = fatal(attempt.stretch)
    numbers = {detect.attempt for detect in attempt.stretch.events_of(Detect)} or {attempt.stretch.number}
    places = [(moment.at, moment.event) for moment in here] + [(moment_of(e, attempt.stretch), e) for e in elsewhere]
    detects = [(at, e.who, e.what) for at, e in places if isinstance(e.what, Detect) and e.what.attempt in numbers]
    if not detects:
        return None, None
    # A node that only lost its peers may record that before the node that lost the worker.
    _, _, detect = min(detects, key=lambda row: (row[2].kind in ("peer", RETURN), row[0], row[1]))
    return detect, min(max(min(at for at, _, _ in detects), attempt.stop), attempt.stretch.end)


def _rank(what: Strike | Detect | None) -> int | None:
    return what.rank if what and what.rank >= 0 else None  # -1: of a worker on another node
