"""What share of the wall clock will train, for each recovery at the save interval that is best for it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.advice.measured import Measured
from holdfast.advice.prices import Price, lost_part, replacement, stall
from holdfast.advice.published import FALLS_BACK
from holdfast.advice.question import Question
from holdfast.advice.saving import Interval, Saving, best_interval, slowdown

LONGEST = 700.0  # mean times between failures; e to the power of more is no float


@dataclass(frozen=True, slots=True)
class Outlook:
    """A recovery with its best save interval: the share of the wall clock that trains, then and as the run saves now."""

    recovery: str
    interval: Interval
    effective: float
    as_it_is: float

    def to_json(self) -> dict[str, Any]:
        """The outlook as JSON values."""
        return asdict(self)


def outlooks(costs: Measured, question: Question, mtbf: float, made: Mapping[str, Price]) -> dict[str, Outlook]:
    """The outlook of every recovery that has a price, at one failure every `mtbf` seconds."""
    return {name: _outlook(costs, question, mtbf, price) for name, price in made.items()}


def saving_of(costs: Measured, question: Question, mtbf: float, recovery: str) -> Saving:
    """What saving and going back cost under a recovery; under a live one only few failures go back to a save."""
    share = 1.0 if recovery == "restart" else FALLS_BACK.value
    return Saving(
        step=costs.step.value,
        stall=stall(costs, question).value,
        mtbf=mtbf / share,
        restart=replacement(costs, question).value,
        durable=costs.durable.value if costs.durable else 0.0,
    )


def _outlook(costs: Measured, question: Question, mtbf: float, price: Price) -> Outlook:
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
