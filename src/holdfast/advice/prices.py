"""The cost of a failure under each recovery strategy, and the fraction of the wall clock spent on training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from holdfast.advice.estimate import BENCHMARK, FALLS_BACK, GIVEN, INFERRED, NOTICE, PUBLISHED, REGROUP, STALL, Estimate
from holdfast.advice.question import Question
from holdfast.advice.run_costs import RunCosts
from holdfast.advice.saving import SaveCosts, SaveInterval, best_interval, slowdown
from holdfast.advice.shard_costs import BANDWIDTH, lag_of, shard_costs
from holdfast.advice.shared_storage import reading_time, snapshot_bytes

RECOVERIES = ("restart", "replay", "forward", "skip")
EXACT = ("restart", "replay")
PROMISES = {
    "restart": "exact: the weights end as if nothing had failed",
    "replay": "exact: the weights end as if nothing had failed",
    "partial": "the lost shard returns to older values, and this is declared",
    "forward": "the samples of lost workers are left out of one step, and declared",
    "skip": "one step is dropped, and declared",
}
# FT-HSDP (arXiv 2602.00277): at O(100K) GPUs survivors continue after 3 minutes, and a restart takes 10 minutes.
# Both are assumed to grow in proportion to the number of workers.
PUBLISHED_WORKERS = 100_000
LIVE_AT_SCALE = Estimate(180.0, 60.0, 600.0, PUBLISHED)
RESTART_AT_SCALE = Estimate(600.0, 300.0, 1200.0, PUBLISHED)
SOONER = 0.75  # benchmarks/live-recovery: replay took 0.73, 0.74 and 0.93 of what a restart took
UNKNOWN_START = Estimate(0.5, 0.2, 10.0, BENCHMARK)


@dataclass(frozen=True, slots=True)
class Price:
    """The estimated cost of a failure under a recovery strategy: pause of training, delay of the run, lost steps."""

    recovery: str
    stands: Estimate  # seconds for which training pauses
    seconds: Estimate  # by which the run ends later
    iterations: Estimate  # repeated or left out; a step without half of its samples counts as 0.5
    promise: str  # how exact the result is


def prices(costs: RunCosts, question: Question, every: int | None = None) -> dict[str, Price]:
    """Return the cost of one failure for each recovery strategy, if the job saves every `every` steps."""
    workers, lost = question.workers or costs.workers, lost_part(costs, question)
    restart = restart_time(costs, question)
    live = live_recovery_time(costs, question)
    repeated = repeated_steps(costs, costs.save_every if every is None else every)
    step = costs.step
    redone = Estimate(repeated.value * step.value, repeated.low * step.low, repeated.high * step.value, repeated.basis)
    price_of = {"restart": Price("restart", restart, restart + redone, repeated, PROMISES["restart"])}
    if workers < 2 or lost == 1 or (costs.sharded and 2 * lost > 1):
        return price_of  # no worker survives, or both copies of a shard are lost
    replay = replay_time(costs, question)
    none = Estimate.exact(0.0, replay.basis)
    if costs.sharded:
        price_of["replay"] = Price("replay", replay, replay, none, PROMISES["replay"])
        if lag := lag_of(lost):
            price_of["partial"] = Price("partial", replay, replay, lag, PROMISES["partial"])
        return price_of
    part = float(lost)
    missing = Estimate(part, 0.0, part + 1 / costs.batch if costs.batch else part, live.basis)
    dropped = Estimate(1.0, 0.0, 1.0, live.basis)
    price_of["replay"] = Price("replay", replay, replay, none, PROMISES["replay"])
    price_of["forward"] = Price("forward", live, live, missing, PROMISES["forward"])
    price_of["skip"] = Price("skip", live, live, dropped, PROMISES["skip"])
    return price_of


def _replacement_time(costs: RunCosts) -> Estimate:
    start = costs.start or UNKNOWN_START
    # It reads no snapshot, and does not compete with other workers that start.
    return NOTICE + Estimate(SOONER * start.value, start.low / costs.workers, start.high, start.basis)


def lost_part(costs: RunCosts, question: Question) -> Fraction:
    """Return the fraction of workers that one failure kills: `question.lost` if it is set, else a node or a worker."""
    return question.lost or Fraction(1, question.nodes or question.workers or costs.workers)


def loses_node(costs: RunCosts, question: Question) -> bool:
    """Return True if one failure takes at least one of the job's several nodes."""
    return (
        question.nodes is not None and question.nodes > 1 and lost_part(costs, question) >= Fraction(1, question.nodes)
    )


def node_returns(costs: RunCosts, question: Question) -> int:
    """Return how often nodes join again after one failure: a lost node is assumed to return, and all workers restart."""
    return int(loses_node(costs, question))


def fallback_share(recovery: str, costs: RunCosts, question: Question) -> float:
    """Return the fraction of the failures that restart all workers under `recovery`.

    Live recovery sometimes falls back to a restart. It always does if the node of rank 0 is lost, at which nodes meet."""
    if recovery == "restart":
        return 1.0
    first_node = float(lost_part(costs, question)) if loses_node(costs, question) else 0.0
    return 1 - (1 - FALLS_BACK[recovery]) * (1 - first_node)


def restart_time(costs: RunCosts, question: Question) -> Estimate:
    """Estimate the seconds from a failure to the next step if all workers restart."""
    if question.restart is not None:
        return Estimate.exact(question.restart, GIVEN)
    read = reading_time(costs, question)
    restart = costs.restart
    if restart is None:
        restart = NOTICE + (costs.start or UNKNOWN_START) + read
    elif question.storage is not None:  # it contains only the reading of the run's own snapshot
        restart = restart + read
    return _at_scale(restart, RESTART_AT_SCALE, costs, question)


def live_recovery_time(costs: RunCosts, question: Question) -> Estimate:
    """Estimate how many seconds training pauses while the surviving workers form a new process group."""
    live = costs.live.get("forward") or costs.live.get("skip")
    if live is None:
        live = REGROUP
        if (replay := costs.live.get("replay")) is not None:  # it forms a new group too, and then does more
            live = Estimate(
                min(live.value, replay.value), min(live.low, replay.low), min(live.high, replay.high), live.basis
            )
    return _at_scale(live, LIVE_AT_SCALE, costs, question)


def replay_time(costs: RunCosts, question: Question) -> Estimate:
    """Estimate how many seconds training pauses until a new worker has replaced the lost one.

    The given time decides, else the replays of the run if the job's state is not much larger, else the given time of a
    restart, else the time that the run took to start."""
    if question.replay is not None:
        return Estimate.exact(question.replay, GIVEN)
    seen = costs.live.get("replay") or costs.live.get("partial")
    if seen is not None and not has_larger_state(costs, question):
        return _at_scale(seen, LIVE_AT_SCALE, costs, question)
    live = live_recovery_time(costs, question)
    if question.restart is not None:
        return max(live, Estimate.exact(question.restart, GIVEN), key=lambda time: time.value)
    new = _replacement_time(costs) + transfer_time(costs, question)
    if is_larger(costs, question):
        return live + new
    return Estimate(max(live.value, new.value), max(live.low, new.low), max(live.high, new.high), new.basis)


def has_larger_state(costs: RunCosts, question: Question) -> bool:
    """Return True if the state of the job has more than twice the bytes of that of the run."""
    return question.parameters is not None and snapshot_bytes(costs, question) > 2 * (costs.state_bytes or 0.0)


def transfer_time(costs: RunCosts, question: Question) -> Estimate:
    """Return the seconds in which a replacement receives its state, if the job's state is much larger than the run's."""
    if not has_larger_state(costs, question):
        return Estimate.exact(0.0, INFERRED)
    parts = (question.workers or costs.workers) if costs.sharded else 1
    return Estimate.exact(snapshot_bytes(costs, question) / parts / (question.bandwidth or BANDWIDTH), INFERRED)


def is_larger(costs: RunCosts, question: Question) -> bool:
    return question.workers is not None and question.workers > costs.workers


def _at_scale(time: Estimate, published: Estimate, costs: RunCosts, question: Question) -> Estimate:
    """Return the pause `time`, which was measured in the run, or a longer pause for a job with more workers.

    For each `PUBLISHED_WORKERS` workers of the larger job, `published` is added."""
    if not is_larger(costs, question):
        return time
    return time + published.times((question.workers or 0) / PUBLISHED_WORKERS)


def save_delay(costs: RunCosts, question: Question) -> Estimate:
    if question.stall is not None:
        return Estimate.exact(question.stall, GIVEN)
    if question.storage is not None and costs.durable is not None and costs.writer == "blocking":
        return costs.durable
    return costs.stall or STALL


def repeated_steps(costs: RunCosts, every: int) -> Estimate:
    """Estimate how many steps are repeated after a failure at a random time, if the run saves every `every` steps."""
    behind = costs.durable.value / costs.step.value if costs.durable else 0.0
    whole = every - 1
    return Estimate(whole / 2 + behind, math.floor(0.05 * whole), math.ceil(0.95 * whole + behind), INFERRED)


LONGEST = 700.0  # mean times between failures; exp() of more overflows


@dataclass(frozen=True, slots=True)
class Outlook:
    """The best save interval for a recovery strategy, and the fraction of wall-clock time then spent on training."""

    recovery: str
    interval: SaveInterval
    effective: float  # with the best save interval
    as_it_is: float  # with the present save interval of the run


def saving_of(costs: RunCosts, question: Question, mtbf: float, recovery: str) -> SaveCosts:
    """Return the costs that determine the best save interval under the strategy `recovery`; `mtbf` is in seconds."""
    restarts = fallback_share(recovery, costs, question) + node_returns(
        costs, question
    )  # after one failure, on average
    return SaveCosts(
        step=costs.step.value,
        stall=save_delay(costs, question).value,
        mtbf=mtbf / restarts,
        restart=restart_time(costs, question).value,
        durable=costs.durable.value if costs.durable else 0.0,
    )


def outlooks(costs: RunCosts, question: Question, mtbf: float, price_of: Mapping[str, Price]) -> dict[str, Outlook]:
    """Return the best save interval and the fraction of time spent training, for each strategy in `price_of`."""
    found, shards = {}, shard_costs(costs, question)
    for recovery, price in price_of.items():
        saving = saving_of(costs, question, mtbf, recovery)
        interval = best_interval(saving, None if question.workers else costs.length)
        live = 1.0
        if recovery != "restart":
            without = float(lost_part(costs, question)) * restart_time(costs, question).value
            missing = without if recovery in ("forward", "skip") else 0.0
            # A failure during a pause of S seconds starts the pause again, so it takes M (e^(S/M) - 1) on average.
            stands = price.stands.value + price.iterations.value * costs.step.value
            live += (1 - fallback_share(recovery, costs, question)) * (
                math.expm1(min(stands / mtbf, LONGEST)) + missing / mtbf
            )
        live *= shards.slower(recovery) if shards else 1.0
        now = float(slowdown(costs.save_every, saving)) * live
        found[recovery] = Outlook(recovery, interval, interval.effective / live, 1 / now)
    return found
