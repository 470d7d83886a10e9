"""The cost of a run: its wall clock by cause, by save and by failure, computed from its event files.

Every second is assigned to a cause. The time before the first step of an attempt is `startup`, or `recovery` after a
failure. The time after the last step of a run is `closing`. Steps, saves and live recoveries record their own seconds.
The remaining time is `unaccounted`; it is negative if something was measured twice.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.cost.attempts import AttemptTimeline, FoundSave, SaveCost, attempts
from holdfast.cost.failure_costs import FailureCost, failure_costs
from holdfast.cost.run_events import RunEvents, of_history
from holdfast.cost.shortest_steps import ShortestSteps
from holdfast.cost.step_block import Item
from holdfast.cost.timeline import timeline
from holdfast.events import Attempt as Began
from holdfast.events import Event, Recover, Straggler
from holdfast.stall import Stall

# In the order of display. `PARTS` are the parts of the stall of a save.
PARTS = ("snapshot", "enqueue", "backpressure", "write", "sync")
CAUSES = ("compute", *PARTS, "recovery", "rework", "data", "startup", "closing", "unaccounted")
Seconds = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCost:
    """The wall-clock time of one attempt, divided by cause, and the counts of its steps."""

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
    """The time that rank 0 waited for late ranks, and the rank for which it waited longest.

    Compute times include waiting for other ranks, so in each step the rank with the shortest compute time counts as
    late."""

    seconds: float
    share: float
    rank: int | None
    rank_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """The wall-clock time of a run by cause (`seconds`), and the costs of its saves, failures and attempts."""

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
    found_saves: tuple[FoundSave, ...]
    failures: tuple[FailureCost, ...]
    attempts: tuple[AttemptCost, ...]
    waiting: Waiting | None
    stragglers: tuple[Straggler, ...]  # the slow periods of ranks and nodes, as the supervisor last reported each
    device: bool  # compute times were measured on the device, not at kernel launch

    @property
    def goodput(self) -> float:
        return _share(self.committed, self.wall)

    @property
    def share(self) -> Seconds:
        """The fraction of the wall-clock time for each cause; the fractions add up to 1."""
        return {cause: _share(seconds, self.wall) for cause, seconds in self.seconds.items()}

    @property
    def listed_saves(self) -> list[SaveCost | FoundSave]:
        """All saves that became durable or were recorded, in the order of attempts and steps."""
        return sorted([*self.saves, *self.found_saves], key=lambda save: (save.attempt, save.step))

    @property
    def stall_per_save(self) -> float:
        """The mean seconds that training waited for one save; 0 if there were no saves."""
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
            "stragglers": [straggler._asdict() for straggler in self.stragglers],
            "device": self.device,
            "saves": [save.to_json() for save in self.saves],
            "found_saves": [save._asdict() for save in self.found_saves],
            "failures": [asdict(failure) for failure in self.failures],
            "attempts": [attempt.to_json() for attempt in self.attempts],
        }


def cost_breakdown(history: Sequence[Event]) -> CostBreakdown:
    """Return the cost of a run from its events in the order of time."""
    return cost_of(of_history(history))


def cost_of(run: RunEvents) -> CostBreakdown:
    """Return the cost of a run from the events that were read for it."""
    history = run.items
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
        found_saves=tuple(found for attempt in timelines for found in attempt.found),
        failures=tuple(failure_costs(timelines, history)),
        attempts=costs,
        waiting=_waiting(timelines, run.shortest, line.wall),
        stragglers=_stragglers(history),
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
        waited = sum(save.stall.waited for save in attempt.saves if last and save.step > last.last)
        bill["closing"] = max(0.0, stretch.end - (last.end if last else attempt.first) - waited)
    bill["unaccounted"] = wall - sum(bill.values())
    return AttemptCost(
        attempt=stretch.number,
        world=next((began.world for began in stretch.events_of(Began)), None),
        ended=attempt.ended,
        restored=next((recover.restored for recover in stretch.events_of(Recover)), None),
        steps=sum(step.steps for step in attempt.steps),
        rolled_back=sum(step.steps for step in attempt.steps if step.rolled_back),
        committed=attempt.committed,
        wall=wall,
        seconds=bill,
    )


def _stall(attempt: AttemptTimeline) -> Stall:
    """Return how long an attempt waited for its saves in total, including saves that never completed."""
    total = sum((save.stall for save in attempt.saves), Stall())
    if not attempt.steps:
        return total
    recorded = sum(save.stall.waited for save in attempt.saves if save.step <= attempt.steps[-1].last)
    return total + Stall(waited=max(0.0, sum(step.stall for step in attempt.steps) - recorded))


def _waiting(timelines: Iterable[AttemptTimeline], shortest: ShortestSteps, wall: float) -> Waiting | None:
    """Measure how long rank 0 waited for late ranks in a run of `wall` seconds; None if only rank 0 recorded steps."""
    if not shortest:
        return None
    waited: defaultdict[int, float] = defaultdict(float)
    for attempt in timelines:
        for step in attempt.steps:
            compute = step.block.column("compute") if step.block and step.steps > 1 else np.array([step.compute])
            shortest.waited(attempt.stretch.number, step.number, compute, waited)
    total, longest = sum(waited.values()), max(sorted(waited), key=waited.__getitem__, default=0)
    rank = longest if total > 0 else None
    return Waiting(seconds=total, share=_share(total, wall), rank=rank, rank_seconds=waited[longest])


def _stragglers(history: Iterable[Item]) -> tuple[Straggler, ...]:
    """Return the last report of each period in which a rank or node was slower than the others, in their order."""
    reports = [event.what for event in history if isinstance(event.what, Straggler)]
    return tuple({(report.attempt, report.name, report.step): report for report in reports}.values())


def _share(part: float, wall: float) -> float:
    return part / wall if wall > 0 else 0.0
