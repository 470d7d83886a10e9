"""Advice from the events of a run: which recovery strategy to choose for failures, and how often to save."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.advice import estimate as published
from holdfast.advice.assumptions import assumptions, range_of, with_range
from holdfast.advice.estimate import GIVEN, MEASURED, Estimate
from holdfast.advice.large_job import LargeJob, simulate_large_job
from holdfast.advice.live_limits import why_restart
from holdfast.advice.prices import (
    EXACT,
    PROMISES,
    Outlook,
    Price,
    is_larger,
    loses_node,
    lost_part,
    node_returns,
    outlooks,
    prices,
    save_delay,
    saving_of,
)
from holdfast.advice.question import Question, bytes_in_words, in_words
from holdfast.advice.run_costs import RunCosts, run_costs
from holdfast.advice.shard_costs import ShardCosts, shard_costs
from holdfast.advice.shared_storage import durable_time, snapshot_bytes
from holdfast.errors import BadInput
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
    figures: tuple[str, ...]  # the share of time that trains, and what decides it: failures, their cost, and saves
    unknown: tuple[str, ...]  # values that the history does not show, and what is assumed
    reasons: tuple[str, ...]
    mtbf: Estimate
    prices: Mapping[str, Price]
    outlooks: Mapping[str, Outlook]
    costs: RunCosts
    shards: ShardCosts | None  # what live recovery of a sharded model costs while nothing fails
    large: LargeJob | None

    def __str__(self) -> str:
        return "\n".join([self.line, *self.figures, *self.unknown, *self.reasons])

    @property
    def line(self) -> str:
        return f"advice: --recovery {self.recovery} --save-every {self.save_every}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def advise(history: Sequence[Event], question: Question | None = None) -> Advice:
    """Return advice for a job, measured from the run in `history`; `question` says how the job differs from it."""
    question = question or Question()
    costs = _job_costs(run_costs(history), question)
    _check_nodes(question, costs.workers)
    mtbf = failure_rate(costs, question)
    outlook_of = outlooks(costs, question, mtbf.value, prices(costs, question))
    price_of = prices(costs, question, outlook_of["restart"].interval.best)
    best = "restart" if why_restart(costs, question) else choose(outlook_of, exact=question.exact)
    large = simulate_large_job(costs, question, mtbf.value) if question.workers else None
    return Advice(
        recovery=best,
        save_every=outlook_of[best].interval.best,
        figures=tuple(_figures(costs, question, mtbf, price_of[best], outlook_of[best], large)),
        unknown=tuple(assumptions(costs, question, mtbf, price_of, best, outlook_of["restart"].interval.best)),
        reasons=tuple(_reasons(costs, question, mtbf, price_of, outlook_of, best)),
        mtbf=mtbf,
        prices=price_of,
        outlooks=outlook_of,
        costs=costs,
        shards=shard_costs(costs, question),
        large=large,
    )


def _check_nodes(question: Question, workers: int) -> None:
    """Raise BadInput if the job has the `workers` of the run and more nodes than these."""
    if question.workers is None and question.nodes is not None and question.nodes > workers:
        raise BadInput(
            f"--nodes {question.nodes} is more than the {workers} worker{'s' * (workers > 1)} of this run: give --workers "
            "for a larger job."
        )


def _job_costs(costs: RunCosts, question: Question) -> RunCosts:
    """Return the costs of the run with the values in `question` in place of those that they replace."""
    step = costs.step if question.step is None else Estimate.exact(question.step, GIVEN)
    return replace(costs, step=step, durable=durable_time(costs, question))


def failure_rate(costs: RunCosts, question: Question) -> Estimate:
    """Estimate the mean seconds between failures: from `question`, else the run's failures, else published rates."""
    workers = question.workers or costs.workers
    if question.mtbf is not None:
        return Estimate.exact(question.mtbf, GIVEN)
    if question.mtbf_per_worker is not None:
        return Estimate.exact(question.mtbf_per_worker / workers, GIVEN)
    if question.mtbf_per_node is not None and question.nodes is not None:
        return Estimate.exact(question.mtbf_per_node / question.nodes, GIVEN)
    if costs.failed >= ENOUGH and question.workers is None:
        around = 1.645 / costs.failed**0.5
        mean = costs.wall / costs.failed
        return Estimate(mean, mean / (1 + around), mean / max(0.1, 1 - around), MEASURED)
    return published.mtbf(workers)


def choose(outlook_of: Mapping[str, Outlook], *, exact: bool = False) -> str:
    """Return the recovery strategy with which the job trains for the largest fraction of the time.

    A strategy that loses samples is chosen only if this fraction is more than 0.01 larger than under any exact
    strategy, and never if only `exact` strategies may be chosen."""
    best = _best(outlook_of, EXACT) or "restart"
    lossy = None if exact else _best(outlook_of, [name for name in outlook_of if name not in EXACT])
    if lossy and outlook_of[lossy].effective > outlook_of[best].effective + WORTH_LOSING_SAMPLES:
        return lossy
    return best


def _best(outlook_of: Mapping[str, Outlook], names: Sequence[str]) -> str | None:
    best: str | None = None
    for name in names:
        if name in outlook_of and (
            best is None or outlook_of[name].effective > outlook_of[best].effective + WORTH_CHANGING
        ):
            best = name
    return best


def _figures(
    costs: RunCosts, question: Question, mtbf: Estimate, price: Price, outlook: Outlook, large: LargeJob | None
) -> list[str]:
    share, cases = f"{outlook.effective:.1%}", ""
    if large:
        simulated = large.shares[price.recovery]
        share = f"{simulated.value:.1%}"
        cases = f" ({simulated.low:.1%} to {simulated.high:.1%} in nine of ten simulations)"
    lines = [
        f"{share} of the wall clock trains{cases}, because:",
        _failures(costs, question, mtbf, price.recovery),
        _priced(price, outlook.interval.best),
        _returns(costs, question, outlook.interval.best),
        _saved(costs, question),
    ]
    return [line for line in lines if line]


def _returns(costs: RunCosts, question: Question, every: int) -> str | None:
    """Return a sentence on the cost when a lost node returns, or None if failures take no nodes."""
    if not node_returns(costs, question):
        return None
    cost = prices(costs, question, every)["restart"].seconds
    return f"When the lost node returns, all workers restart under every strategy: {in_words(cost.value)}, which is included."


# The effect of the number of workers that one failure kills.
EFFECTS = {
    "restart": "under restart their number changes nothing, because all workers restart",
    "replay": "replay needs as many ready spares on other nodes",
    "partial": "partial needs as many ready spares on other nodes",
    "forward": "forward leaves their samples out of one step",
    "skip": "under skip their number changes nothing, because the whole step is dropped",
}


def _failures(costs: RunCosts, question: Question, mtbf: Estimate, recovery: str) -> str:
    basis = mtbf.basis
    if question.mtbf_per_node is not None:
        basis += f": {in_words(question.mtbf_per_node)} for each of {question.nodes} nodes"
    if question.mtbf_per_worker is not None:
        basis += f": {in_words(question.mtbf_per_worker)} for each of {question.workers or costs.workers} workers"
    effect = ""
    if question.lost or question.nodes:
        effect = f" It takes {lost_part(costs, question)} of the workers; {EFFECTS[recovery]}."
    if recovery != "restart" and loses_node(costs, question):
        effect += " The loss of the node of rank 0 is a restart."
    return f"A failure is expected every {in_words(mtbf.value)}{range_of(mtbf, in_words, basis)}.{effect}"


def _saved(costs: RunCosts, question: Question) -> str:
    delay = save_delay(costs, question)
    measured = costs.stalls if question.stall is None else {}
    waits = ", ".join(f"{in_words(wait.value)} under {writer}" for writer, wait in measured.items())
    text = (
        f"A step takes {with_range(costs.step, costs.step.basis)}. A save delays training by "
        f"{with_range(delay, delay.basis)}{waits and f', of which training waits {waits},'}"
    )
    if costs.durable is None:
        return f"{text}."
    basis = costs.durable.basis
    if question.storage is not None:
        basis += f": {bytes_in_words(snapshot_bytes(costs, question))} at {bytes_in_words(question.storage)}/s"
    return f"{text} and is durable after {with_range(costs.durable, basis)}."


def _reasons(
    costs: RunCosts,
    question: Question,
    mtbf: Estimate,
    price_of: Mapping[str, Price],
    outlook_of: Mapping[str, Outlook],
    best: str,
) -> list[str]:
    outlook, interval = outlook_of[best], outlook_of[best].interval
    larger = is_larger(costs, question)
    now = f" With the present interval of {costs.save_every} steps it is {outlook.as_it_is:.2%}."
    longest = ", as long as the run" if question.workers is None and interval.best == costs.length else ""
    return [
        *([] if larger else [_converges(costs)]),
        *(_priced(price, outlook_of["restart"].interval.best) for name, price in price_of.items() if name != best),
        *_sharded(costs, question),
        _why(outlook_of, best, why_restart(costs, question), exact=question.exact),
        f"Save every {interval.best} steps ({in_words(interval.best * costs.step.value)} of training{longest}): then "
        f"{outlook.effective:.2%} of the wall clock trains.{'' if larger else now} "
        f"Every {interval.low} to {interval.high} steps costs at most 1 % more than the best.",
        f"For a failure that returns to a save every {in_words(saving_of(costs, question, mtbf.value, best).mtbf)}, Young's "
        f"formula gives {interval.young} steps, Daly's {interval.daly}. The advice minimises the expected run time, "
        "including the restart and the time until a save is durable.",
    ]


def _converges(costs: RunCosts) -> str:
    losses = costs.losses
    if losses is None:
        why = "the losses do not fall evenly enough" if costs.noted else "the script logs none (run.log(loss=...))"
        return f"How fast training converges is unknown: {why}."
    return (
        f"The losses approach {losses.limit:.3g}: the distance to the optimum shrinks by a factor of {losses.rate.value:.6g} "
        f"a step ({losses.rate.low:.6g} to {losses.rate.high:.6g}), {losses.left.value:.2g} is left, and one more step gains "
        f"{losses.gain:.2g}."
    )


def _priced(price: Price, every: int) -> str:
    """Return a sentence on the cost of a failure; under restart, the job saves every `every` steps."""
    pause = f"Under {price.recovery} a failure stops training for {with_range(price.stands, price.stands.basis)}"
    iterations = price.iterations
    if price.recovery == "restart":
        work = (
            f", and the {_count(iterations.value)} steps{range_of(iterations, _count)} since the last save are "
            f"repeated, with a save every {every} steps: {in_words(price.seconds.value)} together"
        )
    elif iterations.high == 0:
        work = " and no step is repeated"
    else:
        noun = "iteration" if f"{iterations.value:.3g}" == "1" else "iterations"
        work = f" and costs {_count(iterations.value)} {noun}{range_of(iterations, _count)}"
    return f"{pause}{work}; {PROMISES[price.recovery]}."


def _count(steps: float) -> str:
    return f"{steps:.3g}" if steps < 1000 else f"{steps:,.0f}"


def _sharded(costs: RunCosts, question: Question) -> list[str]:
    if shards := shard_costs(costs, question):
        return shards.lines(lost_part(costs, question))
    if costs.sharded:
        return [
            "The model is sharded, so forward and skip are not possible. Its size is unknown, because nothing was saved: give "
            "--parameters to include what replay costs while nothing fails."
        ]
    return []


def _why(outlook_of: Mapping[str, Outlook], best: str, limit: str | None, *, exact: bool) -> str:
    shares = ", ".join(f"{name} {outlook.effective:.2%}" for name, outlook in outlook_of.items())
    text = f"Share of the wall clock that trains, each at its best save interval: {shares}."
    if limit:
        return f"{text} Only restart is advised: {limit}"
    if outlook_of[best].effective < HOPELESS:
        return f"{text} Failures are so frequent that most of the time is lost under every recovery."
    if len(outlook_of) == 1:
        return f"{text} No worker survives a failure, so restart is the only recovery."
    if best == "restart":
        return f"{text} No other{' exact' * exact} recovery gains enough over restart, the simplest one."
    if best in EXACT:
        return f"{text} {best} gains enough, and it is exact."
    gain = outlook_of[best].effective - max(o.effective for name, o in outlook_of.items() if name in EXACT)
    return f"{text} {best} gains {gain:.1%} over the best exact recovery; give --exact if no sample may be lost."
