"""Advice from the events of a run: which recovery strategy to choose for failures, and how often to save."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.advice import estimate as published
from holdfast.advice.estimate import GIVEN, INFERRED, MEASURED, Estimate
from holdfast.advice.large_job import LargeJob, simulate_large_job
from holdfast.advice.prices import (
    EXACT,
    PROMISES,
    Outlook,
    Price,
    is_larger,
    lost_part,
    outlooks,
    prices,
    restart_time,
    save_delay,
    saving_of,
)
from holdfast.advice.question import Question, bytes_in_words, in_words
from holdfast.advice.run_costs import Convergence, RunCosts, run_costs
from holdfast.advice.shard_costs import ShardCosts, shard_costs
from holdfast.events import Event

WORTH_LOSING_SAMPLES = 0.01  # share of the wall clock that an inexact recovery must gain
WORTH_CHANGING = 0.001  # share of the wall clock that a later recovery must gain over an earlier one
HOPELESS = 0.5
ENOUGH = 3  # failures that were not injected, from which a failure rate is estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The recommended recovery strategy and save interval, and the estimates for each strategy that led to them."""

    recovery: str
    save_every: int
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]  # facts that the history does not show
    mtbf: Estimate
    prices: Mapping[str, Price]
    outlooks: Mapping[str, Outlook]
    costs: RunCosts
    shards: ShardCosts | None  # what live recovery of a sharded model costs while nothing fails
    large: LargeJob | None

    def __str__(self) -> str:
        return "\n".join([self.line, *self.reasons, *self.unknown])

    @property
    def line(self) -> str:
        return f"advice: --recovery {self.recovery} --save-every {self.save_every}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def advise(history: Sequence[Event], question: Question | None = None) -> Advice:
    """Return advice for a job, measured from the run in `history`; `question` says how the job differs from it."""
    question, costs = question or Question(), run_costs(history)
    if question.step is not None:
        costs = replace(costs, step=Estimate.exact(question.step, GIVEN))
    mtbf = failure_rate(costs, question)
    price_of = prices(costs, question)
    outlook_of = outlooks(costs, question, mtbf.value, price_of)
    best = choose(outlook_of)
    return Advice(
        recovery=best,
        save_every=outlook_of[best].interval.best,
        reasons=tuple(_reasons(costs, question, mtbf, price_of, outlook_of, best)),
        unknown=(*unknown(costs, question, mtbf), *_over_nccl(costs, outlook_of, best)),
        mtbf=mtbf,
        prices=price_of,
        outlooks=outlook_of,
        costs=costs,
        shards=shard_costs(costs, question),
        large=simulate_large_job(costs, question, mtbf.value) if question.workers else None,
    )


def failure_rate(costs: RunCosts, question: Question) -> Estimate:
    """Estimate the mean seconds between failures: from `question`, else the run's failures, else published rates."""
    workers = question.workers or costs.workers
    if question.mtbf is not None:
        return Estimate.exact(question.mtbf, GIVEN)
    if question.mtbf_per_worker is not None:
        return Estimate.exact(question.mtbf_per_worker / workers, GIVEN)
    if costs.failed >= ENOUGH and question.workers is None:
        around = 1.645 / costs.failed**0.5
        mean = costs.wall / costs.failed
        return Estimate(mean, mean / (1 + around), mean / max(0.1, 1 - around), MEASURED)
    return published.mtbf(workers)


def choose(outlook_of: Mapping[str, Outlook]) -> str:
    """Return the recovery strategy with which the job trains for the largest fraction of the time.

    A strategy that loses samples is chosen only if this fraction is more than 0.01 larger than under any exact
    strategy."""
    exact = _best(outlook_of, EXACT)
    lossy = _best(outlook_of, [name for name in outlook_of if name not in EXACT])
    if lossy and exact and outlook_of[lossy].effective > outlook_of[exact].effective + WORTH_LOSING_SAMPLES:
        return lossy
    return exact or "restart"


def _best(outlook_of: Mapping[str, Outlook], names: Sequence[str]) -> str | None:
    best: str | None = None
    for name in names:
        if name in outlook_of and (
            best is None or outlook_of[name].effective > outlook_of[best].effective + WORTH_CHANGING
        ):
            best = name
    return best


def _reasons(
    costs: RunCosts,
    question: Question,
    mtbf: Estimate,
    price_of: Mapping[str, Price],
    outlook_of: Mapping[str, Outlook],
    best: str,
) -> list[str]:
    outlook, interval = outlook_of[best], outlook_of[best].interval
    measured = costs.stalls if question.stall is None else {}
    waits = ", ".join(f"{in_words(wait.value)} under {writer}" for writer, wait in measured.items())
    return [
        f"A failure is expected every {in_words(mtbf.value)}{_range(mtbf, in_words, mtbf.basis)}.",
        f"A step takes {_with_range(costs.step)}. A save delays training by {_with_range(save_delay(costs, question))}"
        f"{waits and f', of which training waits {waits}'}.",
        *([_converges(costs.losses)] if costs.losses else []),
        *(_priced(price) for price in price_of.values()),
        *_sharded(costs, question),
        _why(outlook_of, best),
        f"Save every {interval.best} steps ({in_words(interval.best * costs.step.value)} of training): then "
        f"{outlook.effective:.2%} of the wall clock trains. With the present interval of {costs.save_every} steps it is "
        f"{outlook.as_it_is:.2%}. Every {interval.low} to {interval.high} steps costs at most 1 % more than the best.",
        f"For a failure that returns to a save every {in_words(saving_of(costs, question, mtbf.value, best).mtbf)}, Young's "
        f"formula gives {interval.young} steps, Daly's {interval.daly}. The advice minimises the expected run time, "
        "including the restart and the time until a save is durable.",
    ]


def _converges(losses: Convergence) -> str:
    return (
        f"The losses approach {losses.limit:.3g}: the distance to the optimum shrinks by a factor of {losses.rate.value:.6g} "
        f"a step ({losses.rate.low:.6g} to {losses.rate.high:.6g}), {losses.left.value:.2g} is left, and one more step gains "
        f"{losses.gain:.2g}."
    )


def _priced(price: Price) -> str:
    iterations = price.iterations
    if iterations.high == 0:
        work = "no step is repeated"
    else:
        noun = "iteration" if f"{iterations.value:.3g}" == "1" else "iterations"
        work = f"{iterations.value:.3g} {noun}{_range(iterations, '{:.3g}'.format)}"
    if price.recovery == "restart":
        work += " since the last save, with the present save interval"
    return (
        f"Under {price.recovery} a failure costs {in_words(price.seconds.value)}"
        f"{_range(price.seconds, in_words, price.seconds.basis)} and {work}; {PROMISES[price.recovery]}."
    )


def _sharded(costs: RunCosts, question: Question) -> list[str]:
    if shards := shard_costs(costs, question):
        return shards.lines(lost_part(costs, question))
    if costs.sharded:
        return [
            "The model is sharded, so forward and skip are not possible. Its size is unknown, because nothing was saved: give "
            "--parameters to include what replay costs while nothing fails."
        ]
    return []


def _why(outlook_of: Mapping[str, Outlook], best: str) -> str:
    shares = ", ".join(f"{name} {outlook.effective:.2%}" for name, outlook in outlook_of.items())
    text = f"Share of the wall clock that trains, each at its best save interval: {shares}."
    if outlook_of[best].effective < HOPELESS:
        return f"{text} Failures are so frequent that most of the time is lost under every recovery."
    if len(outlook_of) == 1:
        return f"{text} No worker survives a failure, so restart is the only recovery."
    if best == "restart":
        return f"{text} No other recovery gains enough over restart, the simplest one."
    if best in EXACT:
        return f"{text} {best} gains enough, and it is exact."
    gain = outlook_of[best].effective - max(o.effective for name, o in outlook_of.items() if name in EXACT)
    return f"{text} {best} gains {gain:.1%} over the best exact recovery; choose that one if no sample may be lost."


def unknown(costs: RunCosts, question: Question, mtbf: Estimate) -> list[str]:
    """Return a sentence for each cost that the history does not show, with the value that is assumed instead."""
    lines = []
    if costs.restart is None and question.restart is None:
        restart = restart_time(costs, question)
        lines.append(
            f"The time of a restart: this run had none, so {_with_range(restart)} is "
            f"inferred from the time this run took to start and {published.SOURCES['notice']}."
        )
    if is_larger(costs, question):
        lines.append(f"The time of a live recovery with this many workers: it is {published.SOURCES['at_scale']}.")
    elif not costs.live:
        lines.append(f"The time of a live recovery: this run had none, so it is {published.SOURCES['regroup']}.")
    if mtbf.basis not in (GIVEN, MEASURED):
        injected = " (injected failures do not count)" if costs.struck else ""
        lines.append(
            f"The failure rate{injected}: it is taken from {published.SOURCES['mtbf']}, with one GPU per worker. "
            "Give --mtbf if you know it."
        )
    shards = shard_costs(costs, question)
    if shards and shards.basis == INFERRED:
        lines.append(
            f"The number of parameters: {shards.parameters:.3g}, the size of a snapshot over 12 bytes, as with AdamW in float32. "
            "Give --parameters if the optimizer is another."
        )
    if shards and question.bandwidth is None and not shards.in_step:
        lines.append(
            f"The bandwidth from a rank to the next, on which the cost of replay for a sharded model depends: "
            f"{bytes_in_words(shards.bandwidth)}/s is assumed. Give --bandwidth if you know it."
        )
    if costs.losses is None:
        why = "the losses do not fall evenly enough" if costs.noted else "the script logs none (run.log(loss=...))"
        lines.append(f"How fast training converges: {why}.")
    return lines


def _over_nccl(costs: RunCosts, outlook_of: Mapping[str, Outlook], best: str) -> list[str]:
    """Return what to choose instead of live recovery if workers communicate over NCCL, which no history records."""
    if best == "restart":
        return []
    loss = "a sharded model restarts after every loss" if costs.sharded else "live recovery is untested"
    every = outlook_of["restart"].interval.best
    return [
        f"The backend: {best} is advised for gloo. Over NCCL on several GPUs {loss}; choose --recovery restart --save-every "
        f"{every} there."
    ]


def _with_range(estimate: Estimate) -> str:
    return f"{in_words(estimate.value)}{_range(estimate, in_words)}"


def _range(estimate: Estimate, words: Callable[[float], str], basis: str = "") -> str:
    low, high = words(estimate.low), words(estimate.high)
    known = "; ".join(filter(None, ("" if low == high else f"{low} to {high}", basis)))
    return f" ({known})" if known else ""
