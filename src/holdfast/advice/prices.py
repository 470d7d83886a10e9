"""What one failure will cost under each recovery of a training run: seconds of standing still and iterations of work.

What share of the wall clock will train, for each recovery at the save interval that is best for it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from holdfast.advice.estimate import BENCHMARK, FALLS_BACK, GIVEN, INFERRED, NOTICE, PUBLISHED, REGROUP, STALL, Estimate
from holdfast.advice.measured import RunCosts
from holdfast.advice.question import Question
from holdfast.advice.saving import SaveCosts, SaveInterval, best_interval, slowdown

RECOVERIES = ("restart", "replay", "forward", "skip")
EXACT = ("restart", "replay")
PROMISES = {
    "restart": "exact: the weights end as if nothing had failed",
    "replay": "exact: the weights end as if nothing had failed",
    "forward": "the samples of lost workers are left out of one step, and declared",
    "skip": "one step is dropped, and declared",
}
LARGE = 1000  # workers, from which our own benchmarks of a few say nothing of how survivors find together
AT_SCALE = Estimate(180.0, 60.0, 600.0, PUBLISHED)  # FT-HSDP (arXiv 2602.00277): 3 minutes at O(100K) GPUs
SOONER = 0.75  # benchmarks/live-recovery: replay took 0.73, 0.74 and 0.93 of what a restart took
UNKNOWN_START = Estimate(0.5, 0.2, 10.0, BENCHMARK)


@dataclass(frozen=True, slots=True)
class Price:
    """What a failure costs: `stands` is how long nothing is trained, `seconds` how much later the run is in all.

    `iterations` are steps that are done again, or training that is not done: a step without half of its samples is half
    an iteration less.
    """

    recovery: str
    stands: Estimate
    seconds: Estimate
    iterations: Estimate
    promise: str

    def to_json(self) -> dict[str, Any]:
        """The price as JSON values."""
        return asdict(self)


def prices(costs: RunCosts, question: Question, every: int | None = None) -> dict[str, Price]:
    """The price of a failure under every recovery that so many workers can do, with so many steps between saves."""
    workers, lost = question.workers or costs.workers, lost_part(costs, question)
    again = replacement(costs, question)
    found = regroup(costs, question)
    redone = rework(costs, costs.save_every if every is None else every)
    seconds = again + _times(redone, costs.step)
    made = {"restart": Price("restart", again, seconds, redone, PROMISES["restart"])}
    if workers < 2 or lost == 1:
        return made  # nobody is left who could go on
    replay = costs.live.get("replay") or _alone(costs, question)
    none = Estimate.exact(0.0, replay.basis)
    part = float(lost)
    missing = Estimate(part, 0.0, part + 1 / costs.batch if costs.batch else part, found.basis)
    dropped = Estimate(1.0, 0.0, 1.0, found.basis)
    made["replay"] = Price("replay", replay, replay, none, PROMISES["replay"])
    made["forward"] = Price("forward", found, found, missing, PROMISES["forward"])
    made["skip"] = Price("skip", found, found, dropped, PROMISES["skip"])
    return made


def _alone(costs: RunCosts, question: Question) -> Estimate:
    """From a loss until a replacement trains: as a start of all workers, but alone, and without a snapshot to be read.

    Where cores are what a start waits for, one worker has them to itself.
    """
    if question.restart is not None:
        return Estimate.exact(question.restart, GIVEN)
    all_of_them = costs.start or UNKNOWN_START
    alone = Estimate(
        SOONER * all_of_them.value,
        all_of_them.low / costs.workers,
        all_of_them.high,
        INFERRED if all_of_them.is_seen else BENCHMARK,
    )
    return NOTICE + alone


def lost_part(costs: RunCosts, question: Question) -> Fraction:
    """Which part of the workers a failure takes: what is given, or else one of them."""
    return question.lost or Fraction(1, question.workers or costs.workers)


def replacement(costs: RunCosts, question: Question) -> Estimate:
    """From a failure until workers that were started for it train: what was seen, or what a start took and a benchmark."""
    if question.restart is not None:
        return Estimate.exact(question.restart, GIVEN)
    if costs.restart is not None:
        return costs.restart
    if costs.start is None:
        return NOTICE + UNKNOWN_START
    read = costs.durable.value if costs.durable else 0.0  # to read a snapshot takes about as long as to write it
    return NOTICE + costs.start + Estimate(read, 0.0, 2 * read, INFERRED)


def regroup(costs: RunCosts, question: Question) -> Estimate:
    """How long training stands still until survivors have found together."""
    seen = costs.live.get("forward") or costs.live.get("skip")
    if (question.workers or costs.workers) > LARGE:
        return AT_SCALE
    return seen or REGROUP


def stall(costs: RunCosts, question: Question) -> Estimate:
    """What a save makes training later."""
    if question.stall is not None:
        return Estimate.exact(question.stall, GIVEN)
    return costs.stall or STALL


def rework(costs: RunCosts, every: int) -> Estimate:
    """Steps since the newest committed save, at a moment that nobody chose."""
    behind = costs.durable.value / costs.step.value if costs.durable else 0.0
    whole = every - 1
    return Estimate(whole / 2 + behind, math.floor(0.05 * whole), math.ceil(0.95 * whole + behind), INFERRED)


def _times(count: Estimate, each: Estimate) -> Estimate:
    """So many, each of which takes about so long."""
    return Estimate(count.value * each.value, count.low * each.low, count.high * each.value, count.basis)


LONGEST = 700.0  # mean times between failures; e to the power of more is no float


@dataclass(frozen=True, slots=True)
class Outlook:
    """A recovery with its best save interval: the share of the wall clock that trains, then and as the run saves now."""

    recovery: str
    interval: SaveInterval
    effective: float
    as_it_is: float

    def to_json(self) -> dict[str, Any]:
        """The outlook as JSON values."""
        return asdict(self)


def outlooks(costs: RunCosts, question: Question, mtbf: float, made: Mapping[str, Price]) -> dict[str, Outlook]:
    """The outlook of every recovery that has a price, at one failure every `mtbf` seconds."""
    return {name: _outlook(costs, question, mtbf, price) for name, price in made.items()}


def saving_of(costs: RunCosts, question: Question, mtbf: float, recovery: str) -> SaveCosts:
    """What saving and going back cost under a recovery; under a live one only few failures go back to a save."""
    share = 1.0 if recovery == "restart" else FALLS_BACK.value
    return SaveCosts(
        step=costs.step.value,
        stall=stall(costs, question).value,
        mtbf=mtbf / share,
        restart=replacement(costs, question).value,
        durable=costs.durable.value if costs.durable else 0.0,
    )


def _outlook(costs: RunCosts, question: Question, mtbf: float, price: Price) -> Outlook:
    saving = saving_of(costs, question, mtbf, price.recovery)
    interval = best_interval(saving)
    live = 1.0
    if price.recovery != "restart":
        without = float(lost_part(costs, question)) * replacement(costs, question).value
        missing = without if price.recovery in ("forward", "skip") else 0.0
        # One that fails while it stands still begins to mend anew, so to stand still for S takes M (e^(S/M) - 1).
        stands = price.stands.value + price.iterations.value * costs.step.value
        live += (1 - FALLS_BACK.value) * (math.expm1(min(stands / mtbf, LONGEST)) + missing / mtbf)
    now = float(slowdown(costs.save_every, saving)) * live
    return Outlook(price.recovery, interval, interval.effective / live, 1 / now)
