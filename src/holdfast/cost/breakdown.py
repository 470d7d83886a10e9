"""What a run cost: its wall clock by cause, save by save, failure by failure, computed from its history alone.

The critical path is divided without rest. An attempt is starting up, or recovering if the one before it failed, until
its first step begins; then it trains; from its failure on the run is recovering again, or after its last step it is
closing. Within the training, steps and saves say what they took, and so do live recoveries, whose seconds are no part of
the step they were in; what nobody claims is `unaccounted`: negative if something was measured twice. So the causes add up to the wall clock by construction.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

from holdfast.cost.attempts import (
    AttemptTimeline,
    Regrouped,
    SaveCost,
    StruckFailure,
    attempts,
    fatal,
    moment_of,
    strikes,
    verdict,
)
from holdfast.cost.formulas import goodput
from holdfast.cost.timeline import RANK_0, Moment, timeline
from holdfast.events import Attempt as Began
from holdfast.events import Detect, Event, Recover, Step, Strike
from holdfast.stall import Stall

# In the order in which they are shown: the paper's, then ours.
PARTS = ("snapshot", "enqueue", "backpressure", "write", "sync")
CAUSES = ("compute", *PARTS, "recovery", "rework", "data", "startup", "closing", "unaccounted")
Seconds = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCost:
    """One failure: what struck whom, how it was detected, and the seconds until training went on.

    `recovery` is `detection` and `restart`, up to where the first new step begins; `restore` is the part of it that
    read the snapshot, and `to_first_step` counts up to the end of that step. `kind` is null if nobody injected the
    failure, `detected` if no supervisor saw it, `ended_attempt` if the history ends too soon to tell. A failure that
    did not end its attempt (a slow rank, a disk that was tried again) has no recovery, unless others went on live
    without the rank: then that is the seconds that they took to find together, and those in which they were joined
    again. Nothing is rolled back, and `samples_lost` were not trained.
    """

    attempt: int
    step: int
    kind: str | None
    rank: int | None
    ended_attempt: bool | None
    detected: str | None = None
    detection: float | None = None
    restart: float | None = None
    restore: float | None = None
    recovery: float = 0.0
    to_first_step: float | None = None
    rework_steps: int = 0
    rework: float = 0.0
    samples_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCost:
    """One attempt: how it ended (null: it goes on, or nobody said), what it did, and its wall clock by cause."""

    attempt: int
    world: int | None
    ended: str | None
    restored: int | None
    steps: int
    rolled_back: int
    committed: int
    wall: float
    seconds: Seconds

    def to_json(self) -> dict[str, Any]:
        """The attempt as one flat row; its causes add up to its wall clock."""
        row = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "seconds"}
        return {**row, **self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How long rank 0 waited in its steps for whichever rank began them last, and which rank it waited for longest.

    A rank that is late finds the others in their first collective already, so of all ranks it computes the shortest.
    One that begins in time and then computes slowly cannot be told from its peers by this. The seconds are part of
    `compute` and `rework`.
    """

    seconds: float
    share: float
    rank: int | None
    rank_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run cost; `seconds` has every cause and adds up to `wall`."""

    ended: str | None
    wall: float
    away: float
    clock_back: float
    committed: int
    trained: int
    rolled_back: int
    samples_lost: int  # by live recoveries that were not rolled back
    restarts: int
    seconds: Seconds
    stall: Stall
    saves: tuple[SaveCost, ...]
    failures: tuple[FailureCost, ...]
    attempts: tuple[AttemptCost, ...]
    waiting: Waiting | None
    device: bool  # compute was measured on the device: what it took, not what launching it took

    @property
    def goodput(self) -> float:
        """Committed logical steps per second of wall clock; 0 before any time has passed."""
        return goodput(self.committed, self.wall) if self.wall > 0 else 0.0

    @property
    def share(self) -> Seconds:
        """The share of each cause in the wall clock; they add up to 1."""
        return {cause: _share(spent, self.wall) for cause, spent in self.seconds.items()}

    @property
    def stall_per_save(self) -> float:
        """The mean of the seconds that training waited for a save; 0 without saves."""
        return self.stall.waited / len(self.saves) if self.saves else 0.0

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
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


def spent(history: Sequence[Event]) -> Spent:
    """What the run with these events cost, up to its last event if it goes on or was killed."""
    line = timeline(history)
    lives = attempts(line.stretches, history)
    costs = tuple(_attempt_cost(life) for life in lives)
    return Spent(
        ended=verdict(line.stretches[-1]) or (None if lives[-1].failed else lives[-1].ended),
        wall=line.wall,
        away=line.away,
        clock_back=line.clock_back,
        committed=lives[-1].committed,
        trained=sum(cost.steps for cost in costs),
        rolled_back=sum(cost.rolled_back for cost in costs),
        samples_lost=sum(len(each.regroup.missing) for life in lives for each in life.regroups if not each.rolled_back),
        restarts=sum(life.after_failure for life in lives),
        seconds={cause: sum(cost.seconds[cause] for cost in costs) for cause in CAUSES},
        stall=sum((_stall(life) for life in lives), Stall()),
        saves=tuple(save for life in lives for save in life.saves),
        failures=tuple(_failures(lives, history)),
        attempts=costs,
        waiting=_waiting(lives, history, line.wall),
        device=any(step.device for life in lives for step in life.steps),
    )


def _attempt_cost(life: AttemptTimeline) -> AttemptCost:
    stretch = life.stretch
    return AttemptCost(
        attempt=stretch.number,
        world=next((began.world for began in stretch.told(Began)), None),
        ended=life.ended,
        restored=next((recover.restored for recover in stretch.told(Recover)), None),
        steps=len(life.steps),
        rolled_back=sum(step.rolled_back for step in life.steps),
        committed=life.committed,
        wall=stretch.end - stretch.begin,
        seconds=_by_cause(life),
    )


def _by_cause(life: AttemptTimeline) -> Seconds:
    """The wall clock of an attempt by cause."""
    bill = dict.fromkeys(CAUSES, 0.0)
    bill["recovery" if life.after_failure else "startup"] += life.first - life.stretch.begin
    bill["recovery"] += life.stretch.end - life.stop
    bill["recovery"] += sum(each.regroup.seconds for each in life.regroups)
    for step in life.steps:
        if step.rolled_back:
            bill["rework"] += step.work
        else:
            bill["compute"] += step.compute
            bill["data"] += step.data
    for save in life.saves:
        for part in PARTS:
            bill[part] += getattr(save.stall, part)
    bill["closing"] = _closing(life)
    bill["unaccounted"] = life.stretch.end - life.stretch.begin - sum(bill.values())
    return bill


def _closing(life: AttemptTimeline) -> float:
    """From the last step to an end in order, without the save there: waiting for saves in flight, and leaving."""
    if life.ended not in ("completed", "preempted"):
        return 0.0
    if not life.steps:
        return life.stretch.end - life.first
    last = life.steps[-1]
    waited = sum(save.stall.waited for save in life.saves if save.step > last.number)
    return max(0.0, life.stretch.end - last.end - waited)


def _stall(life: AttemptTimeline) -> Stall:
    """The stalls of an attempt's saves, and what its steps waited beyond: for saves that it never saw finished."""
    total = sum((save.stall for save in life.saves), Stall())
    if not life.steps:
        return total
    told = sum(save.stall.waited for save in life.saves if save.step <= life.steps[-1].number)
    return total + Stall(waited=max(0.0, sum(step.stall for step in life.steps) - told))


def _failures(lives: Sequence[AttemptTimeline], history: Sequence[Event]) -> list[FailureCost]:
    """Every failure that ended an attempt, and every other that was injected, in order."""
    on_path = {id(moment.event) for life in lives for moment in life.stretch.all(Detect)}
    elsewhere = [event for event in history if isinstance(event.what, Detect) and id(event) not in on_path]
    following = [*pairwise(lives), (lives[-1], None)]
    costs: list[FailureCost] = []
    known = {id(life.struck.event) for life in lives if life.failed and life.struck}
    last = lives[-1].struck if lives[-1].ended is None else None
    for life, after in following:
        struck = [each for each in strikes(history) if each.strike.attempt == life.stretch.number]
        survived = _survived(life, struck, known)
        if life.failed:
            costs.append(_fallen_back(_ending(life, after, elsewhere), survived))
        costs += survived
    for strike, event in strikes(history):
        if id(event) not in known:
            ended = None if last and event is last.event else False
            costs.append(_not_ending(strike, ended))
    return sorted(costs, key=lambda cost: (cost.attempt, cost.step, cost.ended_attempt is True, cost.rank or 0))


def _ending(life: AttemptTimeline, after: AttemptTimeline | None, elsewhere: Iterable[Event]) -> FailureCost:
    """The failure that ended an attempt; its recovery goes on into the next, to the first step if there is one."""
    seen, seen_at = _detection(life, elsewhere)
    until = after.first if after else life.stretch.end
    new = after.steps[0] if after and after.steps else None
    lost = [step for step in life.steps if step.rolled_back]
    restores = [recover.seconds for recover in after.stretch.told(Recover)] if after else []
    strike = life.struck.strike if life.struck else None
    return FailureCost(
        attempt=life.stretch.number,
        step=_next_step(life),
        kind=strike.kind if strike else None,
        rank=_rank(strike or seen),
        ended_attempt=True,
        detected=seen.kind if seen else None,
        detection=None if seen_at is None else seen_at - life.stop,
        restart=until - (life.stop if seen_at is None else seen_at) if new else None,
        restore=restores[0] if restores else None,
        recovery=until - life.stop,
        to_first_step=new.end - life.stop if new else None,
        rework_steps=len(lost),
        rework=sum((step.work for step in lost), 0.0),
    )


def _fallen_back(ending: FailureCost, survived: list[FailureCost]) -> FailureCost:
    """An attempt that members ended since they could not go on without another: it is that one's failure, and one row."""
    if ending.detected != "peer" or ending.kind is not None or not survived or survived[-1].step < ending.step - 1:
        return ending
    lost = survived.pop()
    return replace(
        ending, step=lost.step, kind=lost.kind, rank=lost.rank, detected=lost.detected, detection=lost.detection
    )


def _survived(life: AttemptTimeline, struck: Iterable[StruckFailure], known: set[int]) -> list[FailureCost]:
    """Every member that others went on without; the first of several that were lost at once has what it took."""
    costs: list[FailureCost] = []
    detects = list(life.stretch.all(Detect))
    for each in life.regroups:
        costs += [_lost(life, each, member, struck, detects, known) for member in each.regroup.lost]
        if costs:
            place = -max(1, len(each.regroup.lost))
            taken = costs[place].recovery + each.regroup.seconds
            lost = costs[place].samples_lost + len(each.regroup.missing)
            costs[place] = replace(costs[place], recovery=taken, samples_lost=lost)
    return costs


def _lost(
    life: AttemptTimeline,
    at: Regrouped,
    member: int,
    struck: Iterable[StruckFailure],
    detects: list[Moment],
    known: set[int],
) -> FailureCost:
    mine = (each for each in struck if each.strike.rank == member and each.strike.step <= at.regroup.step + 1)
    strike = next((each for each in mine if id(each.event) not in known), None)
    seen = next((each for each in detects if _rank_of(each) == member), None)
    if strike:
        known.add(id(strike.event))
    if seen:
        detects.remove(seen)
    begin = at.at - at.regroup.seconds
    if strike:
        begin = min(begin, at.at - max(0.0, at.time - strike.event.time))
    after = next((step for step in life.steps if step.number >= at.regroup.step), None)
    what = seen.event.what if seen else None
    return FailureCost(
        attempt=life.stretch.number,
        step=at.regroup.step,
        kind=strike.strike.kind if strike else None,
        rank=member,
        ended_attempt=False,
        detected=what.kind if isinstance(what, Detect) else None,
        detection=max(0.0, seen.at - begin) if seen else None,
        to_first_step=after.end - begin if after else None,
    )


def _rank_of(moment: Moment) -> int | None:
    return moment.event.what.rank if isinstance(moment.event.what, Detect) else None


def _not_ending(strike: Strike, ended_attempt: bool | None) -> FailureCost:
    return FailureCost(
        attempt=strike.attempt, step=strike.step, kind=strike.kind, rank=_rank(strike), ended_attempt=ended_attempt
    )


def _next_step(life: AttemptTimeline) -> int:
    """The step that the failure kept from being trained."""
    if life.struck:
        return life.struck.strike.step
    return life.steps[-1].number + 1 if life.steps else life.committed


def _detection(life: AttemptTimeline, elsewhere: Iterable[Event]) -> tuple[Detect | None, float | None]:
    """How the failure was first seen, and where on the clock; the word of other nodes counts by attempt."""
    here = fatal(life.stretch)
    numbers = {detect.attempt for detect in life.stretch.told(Detect)} or {life.stretch.number}
    places = [(moment.at, moment.event) for moment in here] + [(moment_of(e, life.stretch), e) for e in elsewhere]
    told = [(at, e.who, e.what) for at, e in places if isinstance(e.what, Detect) and e.what.attempt in numbers]
    if not told:
        return None, None
    # A node that only lost its peers may say so before the one that lost a worker.
    _, _, detect = min(told, key=lambda place: (place[2].kind == "peer", place[0], place[1]))
    return detect, min(max(min(at for at, _, _ in told), life.stop), life.stretch.end)


def _waiting(lives: Iterable[AttemptTimeline], history: Iterable[Event], wall: float) -> Waiting | None:
    """What `Waiting` says, from the steps that rank 0 and at least one other rank tell of."""
    shortest: dict[tuple[int, int], tuple[float, str]] = {}
    for event in history:
        if isinstance(event.what, Step) and event.who != RANK_0:
            key = event.what.attempt, event.what.step
            told = event.what.seconds.compute, event.who
            shortest[key] = min(told, shortest.get(key, told))
    if not shortest:
        return None
    waited: defaultdict[str, float] = defaultdict(float)
    for life in lives:
        for step in life.steps:
            compute, late = shortest.get((life.stretch.number, step.number), (step.compute, RANK_0))
            waited[late] += max(0.0, step.compute - compute)
    total, longest = sum(waited.values()), max(sorted(waited), key=waited.__getitem__, default=RANK_0)
    rank = int(longest.removeprefix("rank-")) if total > 0 else None
    return Waiting(seconds=total, share=_share(total, wall), rank=rank, rank_seconds=waited[longest])


def _rank(what: Strike | Detect | None) -> int | None:
    return what.rank if what and what.rank >= 0 else None  # -1: of a worker on another node


def _share(part: float, wall: float) -> float:
    return part / wall if wall > 0 else 0.0
