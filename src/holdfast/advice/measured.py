"""What a history tells of the costs of a training run: its steps, saves, starts and recoveries, each as an estimate."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice, takewhile
from typing import Any

from holdfast import events
from holdfast.advice.convergence import Convergence, convergence
from holdfast.advice.estimate import MEASURED, Estimate, mean_of, next_of, spread_of
from holdfast.cost.attempts import AttemptTimeline, SaveCost, attempts
from holdfast.cost.breakdown import FailureCost, Spent, spent
from holdfast.cost.timeline import RANK_0, timeline
from holdfast.errors import BadInput
from holdfast.events import Event, Launch, Plan, Recover, Regroup, Restart

FEW = 3  # steps, below which nothing is said of how long one takes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """The costs of a run in seconds; None is what its history does not tell."""

    workers: int
    batch: int
    writer: str
    save_every: int
    trained: int
    wall: float
    device: bool
    step: Estimate
    start: Estimate | None  # from the launch of workers to their first step
    stall: Estimate | None  # what a save makes training later, slower steps beside it included
    stalls: Mapping[str, Estimate]  # what training waited for a save, by writer
    durable: Estimate | None  # from the beginning of a save until it can be gone back to
    restart: Estimate | None  # from a failure to the first step of the restarted workers
    live: Mapping[str, Estimate]  # by recovery: what training stood still for after a loss that others survived
    recovery: str | None  # how the run recovers live, if it has
    struck: int  # failures that were injected
    failed: int  # failures that nobody injected
    losses: Convergence | None
    noted: int  # steps with a loss

    @property
    def failures(self) -> int:
        """All that were seen."""
        return self.struck + self.failed

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def measured(history: Sequence[Event]) -> RunCosts:
    """The costs that the history of a training run tells."""
    cost = spent(history)
    lives = attempts(timeline(history).stretches, history)
    steps = [step.work for life in lives for step in life.steps[1:]]  # a life's first step warms up
    if len(steps) < FEW:
        raise BadInput(
            f"{len(steps)} steps after the first tell nothing of how long one takes: train for longer first."
        )
    step = spread_of(steps)
    plan = _last(history, Plan)
    noted = _losses(history)
    recovered = _live(cost, history, step.value)
    return RunCosts(
        workers=max((each.world or 1 for each in cost.attempts), default=1),
        batch=plan.batch if plan else 0,
        writer=plan.writer if plan else "overlapped",
        save_every=plan.save_every if plan else 50,
        trained=cost.trained,
        wall=cost.wall,
        device=cost.device,
        step=step,
        start=_estimated(starts(lives)),
        stall=_stall(lives, step.value),
        stalls={writer: mean_of(waits) for writer, waits in _waits(lives).items()},
        durable=_mean([save.durable_after for save in cost.saves if save.durable_after is not None]),
        restart=_estimated([each for each in map(restart_seconds, cost.failures) if each is not None]),
        live={name: next_of(seconds) for name, seconds in recovered.items() if seconds},
        recovery=next(iter(recovered), None),
        struck=sum(each.kind is not None for each in cost.failures),
        failed=sum(each.kind is None for each in cost.failures),
        losses=convergence(noted),
        noted=len(noted),
    )


def restart_seconds(failure: FailureCost) -> float | None:
    """From a failure to where the first step of restarted workers begins."""
    return failure.recovery if failure.ended_attempt and failure.restart is not None else None


def live_seconds(failure: FailureCost, step: float, joins: float) -> float | None:
    """What training stood still for after a loss that others survived, and when they were joined again.

    From the failure to the end of the next step that counts, less that step.
    """
    if failure.ended_attempt is not False or failure.to_first_step is None or not failure.recovery:
        return None
    return max(0.0, failure.to_first_step - step) + joins


def starts(lives: Iterable[AttemptTimeline]) -> list[float]:
    """From the launch of the workers of each attempt, or where nobody launched them from rank 0's beginning, to its first step."""
    found = []
    for life in lives:
        began = [*life.stretch.all(Launch), *life.stretch.all(Restart), *life.stretch.all(events.Attempt)]
        if began and life.steps:
            restored = sum(each.seconds for each in life.stretch.told(Recover)[:1] if each.restored)
            found.append(max(0.0, life.steps[0].begin - min(moment.at for moment in began) - restored))
    return found


def recoveries(cost: Spent, history: Iterable[Event], step: float) -> list[tuple[FailureCost, float]]:
    """Every failure that training stood still for, and the seconds: until it went on, with or without a restart."""
    joins = _joins(history)
    found = []
    for failure in cost.failures:
        seconds = restart_seconds(failure)
        seconds = live_seconds(failure, step, joins) if seconds is None else seconds
        if seconds is not None:
            found.append((failure, seconds))
    return found


def _joins(history: Iterable[Event]) -> float:
    """The seconds in which members were joined by others, for each time that some were lost."""
    regroups = {(each.attempt, each.number): each for each in _regroups(history)}.values()
    joined = sum(each.seconds for each in regroups if not each.lost and not each.asleep)
    return joined / max(1, sum(bool(each.lost) for each in regroups))


def _regroups(history: Iterable[Event]) -> list[Regroup]:
    return [event.what for event in history if event.who.startswith("rank-") and isinstance(event.what, Regroup)]


def _live(cost: Spent, history: Sequence[Event], step: float) -> dict[str, list[float]]:
    """By the recovery: what each failure that others survived took."""
    regroups = _regroups(history)
    if not regroups:
        return {}
    survived = [seconds for failure, seconds in recoveries(cost, history, step) if failure.ended_attempt is False]
    return {regroups[0].strategy: survived}


def _waits(lives: Iterable[AttemptTimeline]) -> dict[str, list[float]]:
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for _, save in _usual_saves(lives):
        waits[save.writer].append(save.stall.waited)
    return waits


def _usual_saves(lives: Iterable[AttemptTimeline]) -> list[tuple[AttemptTimeline, SaveCost]]:
    """All saves, without those before the first step of a life, which also take memory, if there are others."""
    every = [(life, save) for life in lives for save in life.saves]
    later = [(life, save) for life, save in every if life.steps and save.step > life.steps[0].number]
    return later or every


def _stall(lives: Sequence[AttemptTimeline], step: float) -> Estimate | None:
    """What a save makes training later: the wait, and by how much steps are slower until it is durable."""
    saves = _usual_saves(lives)
    if not saves:
        return None
    waits = mean_of([save.stall.waited for _, save in saves])
    slower = mean_of([_slower(life, save, step) for life, save in saves])
    # Steps may be quicker by chance, but no save makes them so.
    beside = Estimate(max(0.0, slower.value), max(0.0, slower.low), max(0.0, slower.high), MEASURED)
    return waits + beside


def _slower(life: AttemptTimeline, save: SaveCost, usual: float) -> float:
    """How much longer than usual the steps took in which a save was written; below 0 where they were quicker."""
    first = bisect_left(life.steps, save.step, key=lambda step: step.number)
    if first == len(life.steps) or save.durable_after is None:
        return 0.0
    until = life.steps[first].begin + save.durable_after
    beside = takewhile(lambda step: step.begin < until, islice(life.steps, first, None))
    return sum(step.work - usual for step in beside)


def _losses(history: Iterable[Event]) -> list[float]:
    """The mean loss of every step, over the ranks that note one; of a step that was trained again the last."""
    told: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for event in history:
        if isinstance(event.what, events.Step) and event.what.loss is not None:
            told[event.what.step, event.what.attempt].append(event.what.loss)
    last = dict(sorted(told))
    return [sum(each) / len(each) for each in (told[place] for place in sorted(last.items()))]


def _last(history: Iterable[Event], kind: type[Plan]) -> Plan | None:
    found = [event.what for event in history if isinstance(event.what, kind) and event.who == RANK_0]
    return found[-1] if found else None


def _estimated(seconds: Sequence[float]) -> Estimate | None:
    return next_of(seconds) if seconds else None


def _mean(seconds: Sequence[float]) -> Estimate | None:
    return mean_of(seconds) if seconds else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.to_json() if hasattr(value, "to_json") else value
