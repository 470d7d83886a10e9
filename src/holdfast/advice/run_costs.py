"""Estimates of the costs and of the convergence rate of a training run, measured from its events.

The model of convergence: the distance to the optimum shrinks by a factor c in each step, and the loss minus its limit
is the square of that distance. Then the mean losses of three successive ranges of w steps have two differences with the
ratio c^(2w). The uncertainty of c is estimated by adding noise to the means. If many draws diverge, there is no
estimate.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from holdfast import events
from holdfast.advice.estimate import INFERRED, MEASURED, Estimate, mean_of, next_of, spread_of
from holdfast.blocks.division import Floats
from holdfast.cost.attempts import AttemptTimeline, SaveCost, attempts
from holdfast.cost.breakdown import CostBreakdown, cost_breakdown
from holdfast.cost.failure_costs import FailureCost
from holdfast.cost.timeline import RANK_0, timeline
from holdfast.errors import BadInput
from holdfast.events import Commit, Event, Launch, Plan, Recover, Regroup, Restart

FEW = 3  # steps; with fewer, the time of a step is not estimated
FEWEST = 30  # losses
DRAWS = 1000
BYTES_PER_PARAMETER = 12  # in a snapshot: the weight and two moments of AdamW in float32
PARTS = 10  # of each third; their means show how much the mean of the third varies


@dataclass(frozen=True, slots=True)
class Convergence:
    """The convergence of a run, estimated from its losses: its rate, the limit of the loss, and the next decrease."""

    rate: Estimate  # the factor by which the distance to the optimum shrinks in a step
    limit: float  # the loss that the run approaches
    left: Estimate  # the last loss minus `limit`
    gain: float  # by how much the next step lowers the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """The durations of steps, saves and recoveries in a run, measured from its events; None where unknown."""

    workers: int
    batch: int
    writer: str
    sharded: bool  # each worker holds a part of the model
    state_bytes: float | None  # the size of the newest snapshot
    save_every: int
    trained: int
    length: int | None  # the planned number of steps; None if the script draws its own samples
    wall: float
    device: bool
    step: Estimate
    start: Estimate | None  # from the launch of workers to their first step
    stall: Estimate | None  # delay of training by a save, including slower steps while it is written
    stalls: Mapping[str, Estimate]  # time that training waited for a save, by writer
    durable: Estimate | None  # from the start of a save until it is durable
    restart: Estimate | None  # from a failure to the first step of the restarted workers
    live: Mapping[str, Estimate]  # by recovery: the pause of training after a loss that other workers survived
    recovery: str | None  # the live recovery of this run, if it had one
    struck: int  # injected failures
    failed: int  # failures that were not injected
    losses: Convergence | None
    noted: int  # steps with a loss

    @property
    def parameters(self) -> float | None:
        """The parameters of a sharded model, if its snapshots have weights and two moments in float32."""
        return self.state_bytes / BYTES_PER_PARAMETER if self.sharded and self.state_bytes else None


def run_costs(history: Sequence[Event]) -> RunCosts:
    """Measure the costs of steps, saves and recoveries from the events of a run; raise BadInput for too few steps."""
    cost = cost_breakdown(history)
    timelines = attempts(timeline(history).stretches, history)
    steps = [step.work for attempt in timelines for step in attempt.steps[1:]]  # an attempt's first step warms up
    if len(steps) < FEW:
        raise BadInput(f"{len(steps)} steps after the first are too few to time a step: train for longer first.")
    step = spread_of(steps)
    plans = [event.what for event in history if isinstance(event.what, Plan) and event.who == RANK_0]
    plan = plans[-1] if plans else None
    durable = [save.durable_after for save in cost.saves if save.durable_after is not None]
    begun = starts(timelines)
    restarts = [seconds for seconds in map(restart_seconds, cost.failures) if seconds is not None]
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for _, save in _usual_saves(timelines):
        waits[save.writer].append(save.stall.waited)
    noted = _losses(history)
    return RunCosts(
        workers=max((attempt.world or 1 for attempt in cost.attempts), default=1),
        batch=plan.batch if plan else 0,
        writer=plan.writer if plan else "overlapped",
        sharded=plan is not None and plan.sharded,
        state_bytes=next(
            (float(event.what.bytes) for event in reversed(history) if isinstance(event.what, Commit)), None
        ),
        save_every=plan.save_every if plan else 50,
        trained=cost.trained,
        length=_planned_steps(plan) if plan else None,
        wall=cost.wall,
        device=cost.device,
        step=step,
        start=next_of(begun) if begun else None,
        stall=_stall(timelines, step.value),
        stalls={writer: mean_of(seconds) for writer, seconds in waits.items()},
        durable=mean_of(durable) if durable else None,
        restart=next_of(restarts) if restarts else None,
        live={name: next_of(seconds) for name, seconds in _live_pauses(cost, history, step.value).items()},
        recovery=next((regroup.strategy for regroup in _regroups(history)), None),
        struck=sum(failure.kind is not None for failure in cost.failures),
        failed=sum(failure.kind is None and not failure.has_returned for failure in cost.failures),
        losses=convergence(noted),
        noted=len(noted),
    )


def _planned_steps(plan: Plan) -> int | None:
    if plan.limit is not None:
        return plan.limit
    return None if plan.own or not plan.batch else plan.epochs * max(1, plan.samples // plan.batch)


def restart_seconds(failure: FailureCost) -> float | None:
    """Return the seconds from a failure to the first step of the restarted workers, or None if they did not restart."""
    return failure.recovery if failure.ended_attempt and failure.restart is not None else None


def starts(timelines: Iterable[AttemptTimeline]) -> list[float]:
    """Return for each attempt the seconds from its launch to its first step, without the time to load a snapshot."""
    seconds = []
    for attempt in timelines:
        began = [moment for kind in (Launch, Restart, events.Attempt) for moment in attempt.stretch.moments_of(kind)]
        if began and attempt.steps:
            restored = sum(recover.seconds for recover in attempt.stretch.events_of(Recover)[:1] if recover.restored)
            seconds.append(max(0.0, attempt.steps[0].begin - min(moment.at for moment in began) - restored))
    return seconds


def recoveries(cost: CostBreakdown, history: Iterable[Event], step: float) -> list[tuple[FailureCost, float]]:
    """Return (failure, pause in seconds) for each failure that paused training; `step` is the usual step time."""
    regroups = _regroups(history)
    joined = sum(regroup.seconds for regroup in regroups if not regroup.lost and not regroup.asleep)
    joins = joined / max(1, sum(bool(regroup.lost) for regroup in regroups))
    pauses = []
    for failure in cost.failures:
        if (seconds := restart_seconds(failure)) is not None:
            pauses.append((failure, seconds))
        elif failure.ended_attempt is False and failure.to_first_step is not None and failure.recovery:
            pauses.append((failure, max(0.0, failure.to_first_step - step) + joins))
    return pauses


def _regroups(history: Iterable[Event]) -> list[Regroup]:
    found = (event.what for event in history if event.who.startswith("rank-") and isinstance(event.what, Regroup))
    return list({(regroup.attempt, regroup.number): regroup for regroup in found}.values())


def _live_pauses(cost: CostBreakdown, history: Sequence[Event], step: float) -> dict[str, list[float]]:
    """Return the pauses of training, in seconds, that live recoveries caused, by recovery strategy."""
    lost: dict[tuple[int, int, int | None], str] = {
        (regroup.attempt, regroup.step, rank): regroup.strategy
        for regroup in _regroups(history)
        for rank in regroup.lost
    }
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    for failure, seconds in recoveries(cost, history, step):
        if strategy := lost.get((failure.attempt, failure.step, failure.rank)):
            pauses[strategy].append(seconds)
    return pauses


def _usual_saves(timelines: Iterable[AttemptTimeline]) -> list[tuple[AttemptTimeline, SaveCost]]:
    every = [(attempt, save) for attempt in timelines for save in attempt.saves]
    later = [(attempt, save) for attempt, save in every if attempt.steps and save.step > attempt.steps[0].number]
    return later or every


def _stall(timelines: Sequence[AttemptTimeline], step: float) -> Estimate | None:
    """Estimate how many seconds a save delays training; `step` is the usual duration of a step."""
    saves = _usual_saves(timelines)
    if not saves:
        return None
    waits = mean_of([save.stall.waited for _, save in saves])
    slower = mean_of([_slower(attempt, save, step) for attempt, save in saves])
    # Steps beside a save may be faster by chance only.
    beside = Estimate(max(0.0, slower.value), max(0.0, slower.low), max(0.0, slower.high), MEASURED)
    return waits + beside


def _slower(attempt: AttemptTimeline, save: SaveCost, usual: float) -> float:
    first = bisect_left(attempt.steps, save.step, key=lambda step: step.number)
    if first == len(attempt.steps) or save.durable_after is None:
        return 0.0
    until = attempt.steps[first].begin + save.durable_after
    beside = takewhile(lambda step: step.begin < until, islice(attempt.steps, first, None))
    return sum(step.work - usual for step in beside)


def _losses(history: Iterable[Event]) -> list[float]:
    """Return the loss of each step, averaged over ranks, from the last attempt that trained the step."""
    losses: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for event in history:
        if isinstance(event.what, events.Step) and event.what.loss is not None:
            losses[event.what.step, event.what.attempt].append(event.what.loss)
    last_attempt = dict(sorted(losses))
    return [sum(values) / len(values) for values in (losses[key] for key in sorted(last_attempt.items()))]


def convergence(losses: Sequence[float], seed: int = 0) -> Convergence | None:
    """Estimate how fast a run converges from the losses of consecutive steps; return None if they do not converge."""
    values = np.asarray(losses, dtype=np.float64)
    width = len(values) // 3
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    thirds = values[len(values) - 3 * width :].reshape(3, width)
    means, errors = thirds.mean(axis=1), np.array([_error(third) for third in thirds])
    drawn = means + errors * np.random.default_rng(seed).standard_normal((DRAWS, 3))
    ratio, left = _fit(drawn)
    known = (ratio > 0) & (ratio < 1)
    ratio_here, left_here = (float(values[0]) for values in _fit(means[None]))
    if known.mean() < 0.9 or not 0 < ratio_here < 1:
        return None
    rates = ratio[known] ** (0.5 / width)
    low, high = (float(rate) for rate in np.percentile(rates, (5, 95)))
    least, most = (float(value) for value in np.percentile(left[known], (5, 95)))
    c = ratio_here ** (0.5 / width)
    rate = Estimate(c, min(low, c), max(high, c), INFERRED)
    rest = Estimate(left_here, min(least, left_here), max(most, left_here), INFERRED)
    middle = left_here / ratio_here**0.5  # the loss above the limit in the middle of the last third
    return Convergence(rate, float(means[2]) - middle, rest, left_here * (1 - c**2))


def _fit(means: Floats) -> tuple[Floats, Floats]:
    before, after = means[:, 0] - means[:, 1], means[:, 1] - means[:, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = after / before
        ratio = np.where(before > 0, ratio, np.nan)
        # The mean of a third approximates the loss in its middle; its end is half its width later.
        return ratio, after * ratio / (1 - ratio) * np.sqrt(np.clip(ratio, 0, 1))


def _error(values: Floats) -> float:
    width = len(values) // PARTS
    if width < 1:
        return float(values.std(ddof=1) / np.sqrt(len(values)))
    parts = values[: PARTS * width].reshape(PARTS, width).mean(axis=1)
    fall = np.polyval(np.polyfit(np.arange(PARTS), parts, 1), np.arange(PARTS))
    return float((parts - fall).std(ddof=2) / np.sqrt(PARTS))
