"""Recommend the restore mode and the save interval of a run on the parameter server, from its history.

In a contraction by c, a block that goes back by n iterations is c^-n times as far from its optimum as before. If the
fraction p of the blocks does so, and all contribute equally to the distance d, the distance becomes d √(1 + p (c^-2n -
1)), which gives the expected number of lost iterations. This assumes that the perturbation is orthogonal to the
remaining distance. Without this assumption, Theorem 3.2, with the size by Theorem 4.2, allows up to log(1 + √p (c^-n -
1)) / log(1/c) iterations. If all blocks go back, both results are n.
"""

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
from holdfast.server.cost import convergence_rate, served_cost

RECOVERIES = ("partial", "full")
# A lost actor is detected in 8 to 26 ms, a silent one in 1.25 s, a lost machine in seconds.
OUTAGE = Estimate(1.5, 0.05, 15.0, BENCHMARK)
SLOW = 1 - 1e-6  # used if the rate is unknown; so close to 1 it hardly affects the result
FEW = 4  # iterations needed for an estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCosts:
    """Measurements of a parameter-server run that decide what a failure costs.

    They include the seconds of an iteration, a full save and an outage, and the rate of convergence."""

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


@dataclass(frozen=True, slots=True)
class ServedPrice:
    """The expected cost of one failure with one recovery strategy, and the best save interval for this strategy."""

    recovery: str
    iterations: Estimate
    seconds: Estimate
    saving: SaveCosts
    interval: SaveInterval


def served_costs(history: Sequence[Event]) -> ServedCosts:
    run = served_cost(history)
    lines = [event.what for event in history if event.who == "controller"]
    plan = next(what for what in lines if isinstance(what, Serve))
    done = [what for what in lines if isinstance(what, Iterate)]
    if len(done) < FEW:
        raise BadInput(f"The run has {len(done)} iterations, too few to measure one. Train for at least {FEW}.")
    failed = {outage.iteration for outage in run.failures}
    quiet = [iteration for iteration in done[1:] if iteration.iteration not in failed] or done
    step = spread_of([max(1e-6, iteration.seconds - iteration.checkpoint) for iteration in quiet])
    checkpoint = mean_of([iteration.checkpoint for iteration in quiet])
    outages = [max(0.0, outage.seconds - step.value) for outage in run.failures if outage.seconds is not None]
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
        rate=convergence_rate(run),
        noise=noise([loss for loss in run.losses if loss is not None]),
        failures=len(run.failures),
    )


def served_prices(costs: ServedCosts, lost: Fraction, mtbf: float) -> dict[str, ServedPrice]:
    """Return the expected cost of one failure for each recovery strategy, by the name of the strategy.

    A failure loses the fraction `lost` of the blocks, and one is expected every `mtbf` seconds."""
    prices = {}
    outage = costs.outage or OUTAGE
    whole = float(np.mean(np.arange(costs.interval))) or 1.0
    for name in RECOVERIES:
        part = float(lost) if name == "partial" else 1.0
        iterations = iterations_lost(costs.interval, part, costs.rate, costs.noise)
        low, high = max(0.0, iterations.low) * costs.step.low, iterations.high * costs.step.value
        work = Estimate(iterations.value * costs.step.value, low, high, INFERRED)
        step, stall, back = costs.step.value, costs.stall.value, min(1.0, iterations.value / whole)
        saving = SaveCosts(step=step, stall=stall, mtbf=mtbf, restart=outage.value, back=back)
        prices[name] = ServedPrice(name, iterations, outage + work, saving, best_interval(saving, costs.iterations))
    return prices


def iterations_lost(interval: int, lost: float, convergence_rate: float | None, noise: float = 0.0) -> Estimate:
    """Estimate how many iterations a failure costs, if the fraction `lost` of the model returns to its last save.

    Each part is saved every `interval` iterations. `noise`, in iterations, widens the confidence interval."""
    ages = np.arange(interval, dtype=np.float64)  # iterations since a block was saved
    c = convergence_rate or SLOW
    widened = 1.6449 * math.sqrt(2) * noise  # two crossings are compared
    least = 0.0 if lost < 1 else float(np.floor(0.05 * (interval - 1)))
    most = float(bound(np.ceil(0.95 * (interval - 1)), lost, c))
    return Estimate(float(expected(ages, lost, c).mean()), least - widened, most + widened, INFERRED)


def expected(age: Floats | float, lost: float, convergence_rate: float) -> Floats:
    """Return the expected delay in iterations if the fraction `lost` of the model is set back by `age` iterations."""
    away = np.expm1(-2 * np.asarray(age, dtype=np.float64) * math.log(convergence_rate))
    return np.asarray(np.log1p(lost * away) / (-2 * math.log(convergence_rate)))


def bound(age: Floats | float, lost: float, convergence_rate: float) -> Floats:
    """Return the longest delay, in iterations, if the fraction `lost` of the model is set back by `age` iterations."""
    away = np.expm1(-np.asarray(age, dtype=np.float64) * math.log(convergence_rate))
    return np.asarray(np.log1p(math.sqrt(lost) * away) / -math.log(convergence_rate))


def noise(losses: Sequence[float]) -> float:
    """Estimate how many iterations earlier or later the loss reaches a given value because of random noise."""
    late = np.asarray(losses[len(losses) // 2 :], dtype=np.float64)
    if len(late) < 4:
        return 0.0
    gain = abs(float(late[0] - late[-1])) / (len(late) - 1)
    rough = np.diff(late, 2)
    return float(np.std(rough - np.median(rough)) / math.sqrt(6) / gain) if gain > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdvice:
    """Recommended options for a run on the parameter server, with reasons, estimates, and a list of unknown facts."""

    recovery: str
    interval: int
    figures: tuple[str, ...]  # what decides the advice: failures, their cost, and saves
    unknown: tuple[str, ...]
    reasons: tuple[str, ...]
    mtbf: Estimate
    prices: Mapping[str, ServedPrice]
    costs: ServedCosts

    def __str__(self) -> str:
        return "\n".join([self.line, *self.figures, *self.unknown, *self.reasons])

    @property
    def line(self) -> str:
        return f"advice: --restore {self.recovery} --interval {self.interval}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def advise_served(history: Sequence[Event], question: Question | None = None) -> ServedAdvice:
    """Recommend options for a run whose events are `history`; `question` has the user's assumptions about failures."""
    question, costs = question or Question(), served_costs(history)
    for option, value in (("--workers", question.workers), ("--nodes", question.nodes)):
        if value is not None:
            raise BadInput(f"{option} applies to runs of `holdfast run`, not to a parameter server: leave it out.")
    lost = question.lost or Fraction(1, costs.nodes)
    mtbf = estimate.mtbf(costs.nodes)
    if question.mtbf is not None:
        mtbf = Estimate.exact(question.mtbf, GIVEN)
    elif question.mtbf_per_worker is not None:
        mtbf = Estimate.exact(question.mtbf_per_worker / costs.nodes, GIVEN)
    prices = served_prices(costs, lost, mtbf.value)
    best = "full" if lost == 1 else "partial"
    return ServedAdvice(
        recovery=best,
        interval=prices[best].interval.best,
        figures=tuple(_figures(costs, lost, mtbf, prices, best)),
        unknown=tuple(_unknown(costs, mtbf)),
        reasons=tuple(_reasons(costs, lost, mtbf, prices, best)),
        mtbf=mtbf,
        prices=prices,
        costs=costs,
    )


def _figures(
    costs: ServedCosts, lost: Fraction, mtbf: Estimate, prices: Mapping[str, ServedPrice], best: str
) -> list[str]:
    rate = "" if costs.rate is None else f"; it converges by a factor of {costs.rate:.4g} per iteration"
    return [
        "Only lost blocks should be restored, because the others keep what they have learned since the save:"
        if best == "partial"
        else "All blocks are lost at once, so --restore partial could keep nothing:",
        f"A failure is expected every {in_words(mtbf.value)} ({mtbf.basis}), and takes {lost} of the blocks.",
        _priced(costs, prices[best]),
        f"An iteration without its save takes {in_words(costs.step.value)} (median); saving the whole state once delays "
        f"training by {in_words(costs.stall.value)} (mean){rate}.",
    ]


def _priced(costs: ServedCosts, price: ServedPrice) -> str:
    counted = price.iterations
    noun = "iteration" if f"{counted.value:.3g}" == "1" else "iterations"
    return (
        f"With --restore {price.recovery} and the present --interval {costs.interval} a failure costs {counted.value:.3g} {noun} "
        f"({counted.low:.3g} to {counted.high:.3g}) and "
        f"{in_words(price.seconds.value)} ({in_words(price.seconds.low)} to {in_words(price.seconds.high)})."
    )


def _reasons(
    costs: ServedCosts, lost: Fraction, mtbf: Estimate, prices: Mapping[str, ServedPrice], best: str
) -> list[str]:
    interval, part = prices[best].interval, float(lost) if best == "partial" else 1.0
    return [
        *(_priced(costs, price) for name, price in prices.items() if name != best),
        f"Save as much as the whole state every {interval.best} of the run's {costs.iterations} iterations, where a failure "
        f"costs {iterations_lost(interval.best, part, costs.rate, costs.noise).value:.3g} iterations; by Young's formula every "
        f"{interval.young}, by Daly's {interval.daly}, for a failure every {in_words(mtbf.value)} that undoes everything. Every {interval.low} to {interval.high} iterations the "
        "run takes at most 1 % longer than at best.",
    ]


def _unknown(costs: ServedCosts, mtbf: Estimate) -> list[str]:
    lines = []
    if costs.outage is None:
        lines.append("No loss was recorded: the length of an interruption is an estimate from measurements of Ray.")
    if mtbf.basis != GIVEN:
        lines.append(
            f"The failure rate is taken from {estimate.SOURCES['mtbf']}, for as many GPUs as there are nodes. "
            "Give --mtbf if you know it."
        )
    if costs.rate is None:
        lines.append(
            "The rate of convergence is unknown, because the losses do not fall in every iteration. It is assumed to "
            "be slow, where it hardly affects the result."
        )
    never_saved = "A block that was never saved returns to its first value"
    return [*lines, f"{never_saved}: such an early failure can cost more than starting over."]
