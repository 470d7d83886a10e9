"""Why a reduction lies outside the range that a paper gives: what was measured beside it, and which of that explains it.

In goes a panel with its measurement and a claim; out comes a sentence.
"""

from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from holdfast.lab import confidence as interval
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.partial.comparison import PanelComparison
from holdfast.lab.result import Claim
from holdfast.lab.simulate.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ReductionFacts:
    """What may explain the reduction of one strategy on one panel, each measured on the same trials.

    Failures before the first full checkpoint go back to the start, which says nothing of the saves: what follows `early`
    is of the other failures, or of all where there are no others.
    """

    trials: int
    whole: float  # the reduction if costs are counted in whole iterations, as in the paper
    early: int
    later: ConfidenceInterval  # the reduction
    smaller: float  # by how much of itself the perturbation shrinks, on average
    scaled: float | None  # the reduction if blocks are ranked by distance relative to their norm
    concentration: float  # of the movement in the blocks of one save
    largest: float  # the largest block, as a fraction of all values
    budget: float  # what one save may hold, as a fraction of all values


def reduction_facts(compared: PanelComparison, strategy: Strategy, baseline: Strategy) -> ReductionFacts:
    """Look at the trials of a strategy from every side that may explain their costs."""
    measured = compared.measurement
    ours, full = measured.of(strategy), measured.of(baseline)
    both = np.isfinite(ours.cost) & np.isfinite(full.cost)
    early = measured.steps < baseline.policy.interval
    later = both & ~early if (both & ~early).any() else both
    scaled = replace(strategy, policy=replace(strategy.policy, ranking="relative"))
    return ReductionFacts(
        trials=len(later),
        whole=interval.reduction(ours.whole[both], full.whole[both]).value,
        early=int(early.sum()),
        later=interval.reduction(ours.cost[later], full.cost[later]),
        smaller=interval.reduction(ours.size[later], full.size[later]).value,
        scaled=interval.reduction(*interval.paired(measured.of(scaled).cost[later], full.cost[later])).value
        if scaled in measured.strategies
        else None,
        concentration=measured.concentration,
        largest=compared.largest,
        budget=float(strategy.policy.fraction),
    )


def explain_reduction(
    compared: PanelComparison, strategy: Strategy, baseline: Strategy, claim: Claim | None = None
) -> str:
    """The facts of a strategy, and where a claim is outside of its expected range the cause that they show."""
    found = reduction_facts(compared, strategy, baseline)
    if isnan(found.later.value):
        return f"{compared.label}, {_named(strategy)}: full recovery cost nothing, so there is nothing to reduce."
    some = 0 < found.early < found.trials
    which = (
        f"without the {found.early} of {found.trials} failures before the first full checkpoint"
        if some
        else "in fractions"
    )
    line = (
        f"{compared.label}, {_named(strategy)}: in whole iterations, as the paper counts, the reduction is "
        f"{found.whole:.2f}; {which} it is {found.later.value:.2f} ({found.later.low:.2f} to {found.later.high:.2f}), and the "
        f"perturbation is {abs(found.smaller):.0%} {'smaller' if found.smaller >= 0 else 'larger'} than by full recovery."
    )
    if claim is None or claim.holds:
        return line
    return f"{line} {'Cause' if claim.resolved else 'Cause, if not chance'}: {cause_of(found, claim)}"


def cause_of(found: ReductionFacts, claim: Claim) -> str:
    """What takes a reduction out of the expected range, in one clause."""
    low, high = claim.expected
    if found.early == found.trials:
        return "every failure comes before the first full checkpoint, so that full recovery starts over."
    if claim.expects(found.later.value):
        return "the early failures, which go back to the random start; without them it is in the range."
    if claim.expects(found.whole):
        return "the counting; in whole iterations it is in the range."
    if high is not None and claim.measured > high:
        unit = (1 - found.later.value) / (1 - found.smaller)
        return (
            f"survivors bring the restored blocks forward: a unit of perturbation costs {unit:.0%} of what it costs "
            "where everything goes back."
        )
    if found.largest > found.budget:
        return (
            f"one block holds {found.largest:.0%} of the values and a save may hold {found.budget:.1%} of them, so "
            "that block is saved no more often than by full checkpoints."
        )
    if found.scaled is not None and claim.expects(found.scaled):
        return (
            "distances of large and of small blocks are ranked alike; ranked relative to their norms, and without "
            f"early failures, it is {found.scaled:.2f}, in the range."
        )
    if found.budget < 1 and low is not None and found.smaller < low:
        return (
            f"what moves is spread over the blocks, so the saves are not fresh enough: the {found.budget:.1%} of the "
            f"state that moved most makes {found.concentration:.0%} of the squared movement between full checkpoints."
        )
    return "not found; the perturbation shrinks as expected, and the cost does not."


def _named(strategy: Strategy) -> str:
    policy = strategy.policy
    return (
        f"{policy.ranking} {policy.fraction}, {strategy.lost} lost" if policy.fraction < 1 else f"{strategy.lost} lost"
    )
