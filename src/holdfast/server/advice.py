"""An advice for a served run: what a lost node will cost in iterations and seconds, what to put back, how often to save."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from holdfast.advice import estimate
from holdfast.advice.estimate import GIVEN, Estimate
from holdfast.advice.question import Question, in_words
from holdfast.errors import BadInput
from holdfast.events import Event
from holdfast.server.prices import ServedCosts, ServedPrice, served_costs, served_prices


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
        return f"advice: --recovery {self.recovery} --interval {self.interval}"

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
