"""What a failure will cost a served run, in iterations: by how far blocks go back, and which part of them.

In a contraction by c, a block that goes back a iterations is c^-a times as far from its optimum as it was. If a part p of
the blocks does so, and all have the same part in the distance d, that becomes d √(1 + p (c^-2a - 1)): so many iterations
later the run is. A perturbation need not be orthogonal to what is left: Theorem 3.2 allows up to
log(1 + √p (c^-a - 1)) / log(1/c), by Theorem 4.2 for the size, and one may happen to cost nothing. If all go back, both are a.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from holdfast.advice.estimate import BENCHMARK, INFERRED, Estimate, mean_of, next_of, spread_of
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
