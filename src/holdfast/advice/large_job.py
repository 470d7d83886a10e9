"""The same training as a large job: what share of its wall clock would train under each recovery, simulated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.advice.durations import in_words
from holdfast.advice.estimate import INFERRED, Estimate
from holdfast.advice.measured import Measured
from holdfast.advice.outlook import saving_of
from holdfast.advice.prices import LARGE, Price, lost_part, prices, replacement, stall
from holdfast.advice.published import FALLS_BACK
from holdfast.advice.question import Question
from holdfast.advice.saving import best_interval
from holdfast.advice.scale import REPLICATIONS, Job, effective, summary


@dataclass(frozen=True, slots=True)
class Large:
    """A job of so many workers: by recovery the share that trains and the steps between saves, and what was assumed."""

    workers: int
    shares: Mapping[str, Estimate]
    every: Mapping[str, int]
    assumed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
        return {
            "workers": self.workers,
            "shares": {name: each.to_json() for name, each in self.shares.items()},
            "every": dict(self.every),
            "assumed": list(self.assumed),
        }


def large(costs: Measured, question: Question, mtbf: float) -> Large:
    """The job that the question is about, simulated under every recovery, each with its best save interval."""
    made = prices(costs, question)
    every = {name: best_interval(saving_of(costs, question, mtbf, name)).best for name in made}
    shares = {
        name: summary(effective(job_of(costs, question, mtbf, price, every[name]), seed=question.seed), INFERRED)
        for name, price in made.items()
    }
    return Large(question.workers or costs.workers, shares, every, tuple(_assumed(costs, question, mtbf)))


def job_of(costs: Measured, question: Question, mtbf: float, price: Price, every: int) -> Job:
    """The job as the simulation takes it."""
    live = price.recovery != "restart"
    leaves = price.recovery in ("forward", "skip")
    again = replacement(costs, question)
    return Job(
        mtbf=mtbf,
        length=question.length,
        work=every * costs.step.value,
        stall=stall(costs, question),
        durable=costs.durable.value if costs.durable else 0.0,
        restart=again,
        goes_back=FALLS_BACK.value if live else 1.0,
        live=price.stands + price.iterations.times(costs.step.value) if live else Estimate.exact(0.0, INFERRED),
        absent=again.value if leaves else 0.0,
        lost=float(lost_part(costs, question)) if leaves else 0.0,
    )


def _assumed(costs: Measured, question: Question, mtbf: float) -> list[str]:
    workers = question.workers or costs.workers
    again = replacement(costs, question)
    lines = [
        f"{workers} workers train a step in {in_words(costs.step.value)}, as {costs.workers} do in this run.",
        f"Failures are independent of each other and come every {in_words(mtbf)} on average; each takes "
        f"{lost_part(costs, question)} of the workers.",
        f"A restart takes {in_words(again.value)} ({again.basis}), a save makes training "
        f"{in_words(stall(costs, question).value)} later ({stall(costs, question).basis}). On a large job both take longer: "
        "give --restart and --stall.",
        f"Of failures that are survived live {FALLS_BACK.value:.1%} end in a restart all the same ({FALLS_BACK.basis}).",
        f"{in_words(question.length)} of wall clock, {REPLICATIONS} replications; the interval is where "
        "nine of ten of them lie.",
    ]
    if workers > LARGE:
        lines.append("Survivors find together in 3 minutes, as FT-HSDP (arXiv 2602.00277) reports for O(100K) GPUs.")
    return lines
