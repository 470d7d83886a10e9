"""An advice: what a failure will cost under each recovery, which one to choose, how often to save, and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.advice import estimate as published
from holdfast.advice.convergence import Convergence
from holdfast.advice.estimate import GIVEN, MEASURED, Estimate
from holdfast.advice.large_job import Large, large
from holdfast.advice.measured import RunCosts, measured
from holdfast.advice.prices import EXACT, LARGE, PROMISES, Outlook, Price, outlooks, prices, regroup, replacement, stall
from holdfast.advice.question import Question, in_words
from holdfast.events import Event

WORTH_LOSING_SAMPLES = 0.01  # of the wall clock, which an inexact recovery has to gain
WORTH_CHANGING = 0.001
HOPELESS = 0.5
ENOUGH = 3  # failures that nobody injected, from which a rate is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do, and what it rests on."""

    recovery: str
    save_every: int
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]  # what the history does not tell
    mtbf: Estimate
    prices: Mapping[str, Price]
    outlooks: Mapping[str, Outlook]
    costs: RunCosts
    large: Large | None

    def __str__(self) -> str:
        return "\n".join([self.line, *self.reasons, *self.unknown])

    @property
    def line(self) -> str:
        """The advice in one line."""
        return f"advice: --recovery {self.recovery} --save-every {self.save_every}"

    def to_json(self) -> dict[str, Any]:
        """Every number as plain values."""
        return {
            "recovery": self.recovery,
            "save_every": self.save_every,
            "reasons": list(self.reasons),
            "unknown": list(self.unknown),
            "mtbf": self.mtbf.to_json(),
            "prices": {name: each.to_json() for name, each in self.prices.items()},
            "outlooks": {name: each.to_json() for name, each in self.outlooks.items()},
            "costs": self.costs.to_json(),
            "large": self.large.to_json() if self.large else None,
        }


def advise(history: Sequence[Event], question: Question | None = None) -> Advice:
    """The advice that the history of a training run gives."""
    asked, costs = question or Question(), measured(history)
    mtbf = failure_rate(costs, asked)
    made = prices(costs, asked)
    found = outlooks(costs, asked, mtbf.value, made)
    best = choose(found)
    return Advice(
        recovery=best,
        save_every=found[best].interval.best,
        reasons=tuple(_reasons(costs, asked, mtbf, made, found, best)),
        unknown=tuple(unknown(costs, asked, mtbf)),
        mtbf=mtbf,
        prices=made,
        outlooks=found,
        costs=costs,
        large=large(costs, asked, mtbf.value) if asked.workers else None,
    )


def failure_rate(costs: RunCosts, question: Question) -> Estimate:
    """The mean time between failures of the job: as given, or seen often enough, or else published for its size."""
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


def choose(found: Mapping[str, Outlook]) -> str:
    """The recovery with the most of the wall clock for training; an inexact one has to gain more, to be worth samples."""
    exact = _first_or_better(found, EXACT)
    lossy = _first_or_better(found, [name for name in found if name not in EXACT])
    if lossy and exact and found[lossy].effective > found[exact].effective + WORTH_LOSING_SAMPLES:
        return lossy
    return exact or "restart"


def _first_or_better(found: Mapping[str, Outlook], names: Sequence[str]) -> str | None:
    """The first of these, unless a later one is noticeably better."""
    best: str | None = None
    for name in names:
        if name in found and (best is None or found[name].effective > found[best].effective + WORTH_CHANGING):
            best = name
    return best


def _reasons(
    costs: RunCosts,
    question: Question,
    mtbf: Estimate,
    made: Mapping[str, Price],
    found: Mapping[str, Outlook],
    best: str,
) -> list[str]:
    chosen, interval = found[best], found[best].interval
    return [
        f"A failure is expected every {in_words(mtbf.value)} ({_range(mtbf, in_words)}; {mtbf.basis}).",
        f"A step takes {_spoken(costs.step)}; a save makes training {_spoken(stall(costs, question))} later{_waits(costs)}.",
        *([_converges(costs.losses)] if costs.losses else []),
        *(_priced(price) for price in made.values()),
        _why(found, best),
        f"Save every {interval.best} steps ({in_words(interval.best * costs.step.value)} of training): then "
        f"{chosen.effective:.2%} of the wall clock trains; saving every {costs.save_every} steps, as this run does, it is "
        f"{chosen.as_it_is:.2%}. Every {interval.low} to {interval.high} steps the run takes at most 1 % longer than at best.",
        f"By Young's formula it is every {interval.young} steps, by Daly's {interval.daly}; the advice minimises the expected "
        "time itself, with the restart, and with how long a save takes until it can be gone back to.",
    ]


def _waits(costs: RunCosts) -> str:
    told = [f"{in_words(wait.value)} under {writer}" for writer, wait in costs.stalls.items()]
    return f", of which it waits {', '.join(told)}" if told else ""


def _converges(found: Convergence) -> str:
    return (
        f"By its losses it comes nearer to its optimum by a factor of {found.rate.value:.6g} a step ({found.rate.low:.6g} to "
        f"{found.rate.high:.6g}): they fall towards {found.limit:.3g}, {found.left.value:.2g} are left, and a step lost now is "
        f"worth {found.gain:.2g}."
    )


def _priced(price: Price) -> str:
    counted = price.iterations
    work = (
        "no step is done again" if counted.high == 0 else f"{counted.value:.3g} iterations ({_range(counted, _number)})"
    )
    if price.recovery == "restart":
        work += " of steps since the last save, as often as this run saves"
    return (
        f"Under {price.recovery} a failure costs {in_words(price.seconds.value)} ({_range(price.seconds, in_words)}; "
        f"{price.seconds.basis}) and {work}; {PROMISES[price.recovery]}."
    )


def _why(found: Mapping[str, Outlook], best: str) -> str:
    shares = ", ".join(f"{name} {each.effective:.2%}" for name, each in found.items())
    told = f"Of the wall clock would train, each at its best save interval: {shares}."
    if found[best].effective < HOPELESS:
        return f"{told} Failures come so quickly that most of the time is lost, whatever is chosen."
    if len(found) == 1:
        return f"{told} Nobody is left who could go on without the lost workers, so restart is all there is."
    if best == "restart":
        return f"{told} No other recovery gains enough to be worth a change from restart, the simplest."
    if best in EXACT:
        return f"{told} So {best} is worth it, and it is exact."
    gains = found[best].effective - max(each.effective for name, each in found.items() if name in EXACT)
    return f"{told} {best} gains {gains:.1%} over the best that is exact; if no sample may be lost, choose that one."


def unknown(costs: RunCosts, question: Question, mtbf: Estimate) -> list[str]:
    """What the history cannot tell, and what stands in its place."""
    lines = []
    if costs.restart is None and question.restart is None:
        again = replacement(costs, question)
        lines.append(
            f"No restart was seen: {in_words(again.value)} ({_range(again, in_words)}) are inferred from how long this run took "
            f"to start, and {published.SOURCES['notice']}."
        )
    if not regroup(costs, question).is_seen:
        scale = (question.workers or costs.workers) > LARGE
        lines.append(
            f"No loss was survived live: what that takes is {published.SOURCES['at_scale' if scale else 'regroup']}."
        )
    if mtbf.basis not in (GIVEN, MEASURED):
        injected = " (what was injected says nothing of it)" if costs.struck else ""
        lines.append(
            f"How often something fails, this run cannot tell{injected}: it is taken from {published.OF_A_WORKER.source}, "
            "for as many GPUs as there are workers. Give --mtbf if you know better."
        )
    if costs.losses is None:
        why = "it logs none (run.log(loss=...))" if not costs.noted else "they do not fall evenly enough"
        lines.append(f"How fast it converges, its losses do not tell: {why}.")
    return lines


def _spoken(estimate: Estimate) -> str:
    return f"{in_words(estimate.value)} ({_range(estimate, in_words)})"


def _range(estimate: Estimate, words: Callable[[float], str]) -> str:
    return f"{words(estimate.low)} to {words(estimate.high)}"


def _number(value: float) -> str:
    return f"{value:.3g}"
