"""An advice for a served run: what a lost node will cost in iterations and seconds, what to put back, how often to save."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from holdfast.advice import estimate
from holdfast.advice.estimate import BENCHMARK, GIVEN, INFERRED, Estimate, mean_of, next_of, spread_of
from holdfast.advice.question import Question, in_words
from holdfast.advice.saving import SaveCosts, SaveInterval, best_interval
from holdfast.blocks.division import Floats
from holdfast.errors import BadInput
from holdfast.events import Event, Iterate, Serve
from holdfast.server.cost import Served, contraction, served_cost

RECOVERIES = ("partial", "full")
OUTAGE = Estimate(
    1.5, 0.05, 15.0, BENCHMARK
)  # a lost actor is seen in 8 to 26 ms, a silent one in 1.25 s; a node in seconds
SLOW = 1 - 1e-6  # stands for a rate that is not known: then it hardly matters which it is
FEW = 4  # iterations, below which nothing is said


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCosts:
    """What the history of a served run tells: seconds of an iteration, of a save of the whole state, and how it converges."""

    workload: str
    nodes: int
    interval: int
    recovery: str
    policy: str
    iterations: int
    step: Estimate
    stall: Estimate
    outage: Estimate | None
    rate: float | None
    noise: float  # iterations by which chance moves a crossing of the criterion
    failures: int

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ServedPrice:
    """What one failure costs under a recovery."""

    recovery: str
    iterations: Estimate
    seconds: Estimate
    saving: SaveCosts
    interval: SaveInterval

    def to_json(self) -> dict[str, Any]:
        """The price as JSON values."""
        return asdict(self)


def served_costs(history: Sequence[Event]) -> ServedCosts:
    """The costs that the history of a served run tells."""
    run = served_cost(history)
    told = [event.what for event in history if event.who == "controller"]
    plan = next(what for what in told if isinstance(what, Serve))
    done = [what for what in told if isinstance(what, Iterate)]
    if len(done) < FEW:
        raise BadInput(f"{len(done)} iterations tell nothing of how long one takes: train for longer first.")
    quiet = [each for each in done[1:] if each.iteration not in {outage.iteration for outage in run.failures}] or done
    step = spread_of([max(1e-6, each.seconds - each.checkpoint) for each in quiet])
    checkpoint = mean_of([each.checkpoint for each in quiet])
    outages = [max(0.0, each.seconds - step.value) for each in run.failures if each.seconds is not None]
    return ServedCosts(
        workload=plan.workload,
        nodes=plan.nodes,
        interval=plan.interval,
        recovery=plan.recovery,
        policy=plan.policy,
        iterations=run.iterations,
        step=step,
        stall=checkpoint.times(plan.interval),
        outage=next_of(outages) if outages else None,
        rate=_rate(run),
        noise=noise([loss for loss in run.losses if loss is not None]),
        failures=len(run.failures),
    )


def served_prices(costs: ServedCosts, lost: Fraction, mtbf: float) -> dict[str, ServedPrice]:
    """The price of a failure that takes this part of the blocks, under each recovery."""
    return {name: _price(costs, name, lost if name == "partial" else Fraction(1), mtbf) for name in RECOVERIES}


def iterations_lost(interval: int, lost: float, rate: float | None, noise: float = 0.0) -> Estimate:
    """The iteration cost of a failure at a moment that nobody chose, if this part of the blocks goes back to its saves."""
    ages = np.arange(interval, dtype=np.float64)  # a block was saved so many iterations ago
    c = rate or SLOW
    widened = 1.6449 * math.sqrt(2) * noise  # two crossings are compared
    least = 0.0 if lost < 1 else float(np.floor(0.05 * (interval - 1)))
    most = float(bound(np.ceil(0.95 * (interval - 1)), lost, c))
    return Estimate(float(expected(ages, lost, c).mean()), least - widened, most + widened, INFERRED)


def expected(age: Floats | float, lost: float, c: float) -> Floats:
    """Iterations that a run is later if a part of its blocks goes back so many iterations, and is orthogonal to the rest."""
    away = np.expm1(-2 * np.asarray(age, dtype=np.float64) * math.log(c))
    return np.asarray(np.log1p(lost * away) / (-2 * math.log(c)))


def bound(age: Floats | float, lost: float, c: float) -> Floats:
    """Iterations that a run is later at most, by Theorem 3.2."""
    away = np.expm1(-np.asarray(age, dtype=np.float64) * math.log(c))
    return np.asarray(np.log1p(math.sqrt(lost) * away) / -math.log(c))


def noise(losses: Sequence[float]) -> float:
    """By how many iterations chance moves the moment at which the loss meets a level, from the last half of the losses.

    What is not smooth in them is chance: the differences of differences of independent noise have six times its variance.
    """
    late = np.asarray(losses[len(losses) // 2 :], dtype=np.float64)
    if len(late) < 4:
        return 0.0
    gain = abs(float(late[0] - late[-1])) / (len(late) - 1)
    rough = np.diff(late, 2)
    return float(np.std(rough - np.median(rough)) / math.sqrt(6) / gain) if gain > 0 else 0.0


def _price(costs: ServedCosts, name: str, lost: Fraction, mtbf: float) -> ServedPrice:
    iterations = iterations_lost(costs.interval, float(lost), costs.rate, costs.noise)
    outage = costs.outage or OUTAGE
    work = Estimate(
        iterations.value * costs.step.value,
        max(0.0, iterations.low) * costs.step.low,
        iterations.high * costs.step.value,
        INFERRED,
    )
    whole = float(np.mean(np.arange(costs.interval))) or 1.0
    saving = SaveCosts(
        step=costs.step.value,
        stall=costs.stall.value,
        mtbf=mtbf,
        restart=outage.value,
        back=min(1.0, iterations.value / whole),
    )
    return ServedPrice(name, iterations, outage + work, saving, best_interval(saving))


def _rate(run: Served) -> float | None:
    rate = contraction(run)
    return rate.c if rate else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdvice:
    """What to do, and what it rests on."""

    recovery: str
    interval: int
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    mtbf: Estimate
    prices: Mapping[str, ServedPrice]
    costs: ServedCosts

    def __str__(self) -> str:
        return "\n".join([self.line, *self.reasons, *self.unknown])

    @property
    def line(self) -> str:
        """The advice in one line."""
        return f"advice: --restore {self.recovery} --interval {self.interval}"

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
        return {
            "recovery": self.recovery,
            "interval": self.interval,
            "reasons": list(self.reasons),
            "unknown": list(self.unknown),
            "mtbf": self.mtbf.to_json(),
            "prices": {name: each.to_json() for name, each in self.prices.items()},
            "costs": self.costs.to_json(),
        }


def advise_served(history: Sequence[Event], question: Question | None = None) -> ServedAdvice:
    """The advice that the history of a served run gives."""
    asked, costs = question or Question(), served_costs(history)
    if asked.workers is not None:
        raise BadInput("--workers is about runs of `holdfast run`, and this is a served run: leave it out")
    lost = asked.lost or Fraction(1, costs.nodes)
    mtbf = _mtbf(costs, asked)
    prices = served_prices(costs, lost, mtbf.value)
    best = "full" if lost == 1 else "partial"
    return ServedAdvice(
        recovery=best,
        interval=prices[best].interval.best,
        reasons=tuple(_reasons(costs, lost, mtbf, prices, best)),
        unknown=tuple(_unknown(costs, mtbf)),
        mtbf=mtbf,
        prices=prices,
        costs=costs,
    )


def _mtbf(costs: ServedCosts, question: Question) -> Estimate:
    if question.mtbf is not None:
        return Estimate.exact(question.mtbf, GIVEN)
    if question.mtbf_per_worker is not None:
        return Estimate.exact(question.mtbf_per_worker / costs.nodes, GIVEN)
    return estimate.mtbf(costs.nodes)


def _reasons(
    costs: ServedCosts, lost: Fraction, mtbf: Estimate, prices: Mapping[str, ServedPrice], best: str
) -> list[str]:
    interval = prices[best].interval
    rate = "" if costs.rate is None else f"; it converges by {costs.rate:.4g} an iteration"
    lines = [
        f"A failure is expected every {in_words(mtbf.value)} ({mtbf.basis}), and takes {lost} of the blocks.",
        f"An iteration takes {in_words(costs.step.value)}; to save the whole state once makes training "
        f"{in_words(costs.stall.value)} later{rate}.",
    ]
    for name, price in prices.items():
        counted = price.iterations
        lines.append(
            f"Under {name} recovery a failure costs {counted.value:.3g} iterations ({counted.low:.3g} to {counted.high:.3g}) and "
            f"{in_words(price.seconds.value)} ({in_words(price.seconds.low)} to {in_words(price.seconds.high)})."
        )
    lines.append(
        "So only lost blocks should come back: the others keep what they have learned since."
        if best == "partial"
        else "All blocks are lost at once, so there is nothing that partial recovery could keep."
    )
    lines.append(
        f"Save as much as the whole state every {interval.best} iterations; by Young's formula every {interval.young}, by "
        f"Daly's {interval.daly}, for a failure that undoes everything. Every {interval.low} to {interval.high} iterations the "
        "run takes at most 1 % longer than at best."
    )
    return lines


def _unknown(costs: ServedCosts, mtbf: Estimate) -> list[str]:
    lines = []
    if costs.outage is None:
        lines.append(
            "No loss was seen: how long training stands still is taken from our measurements of Ray, with a wide range."
        )
    if mtbf.basis != GIVEN:
        lines.append(
            f"How often something fails is taken from {estimate.OF_A_WORKER.source}, for as many GPUs as there are nodes. "
            "Give --mtbf if you know better."
        )
    if costs.rate is None:
        lines.append(
            "How fast it converges, its losses do not tell (they do not fall in every iteration): it is taken to be slow, for "
            "which the iterations hardly depend on it."
        )
    lines.append(
        "Before the first save of a block its first value comes back: such a failure can cost more than starting over."
    )
    return lines
