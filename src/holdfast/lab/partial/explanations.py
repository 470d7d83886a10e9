"""Explain why a cost reduction is outside the range that a paper gives, from other measurements of the same trials."""

from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from holdfast.lab import confidence
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.partial.comparison import PanelComparison
from holdfast.lab.result import Claim
from holdfast.lab.simulate.strategy import Strategy


@dataclass(frozen=True, slots=True)
class ReductionFacts:
    """Measurements that may explain by how much one strategy reduces the cost of failures on one model and data set.

    `whole` is the reduction over all `trials` in whole iterations, as in the paper. `early` counts failures before
    the first full checkpoint, after which both strategies restore the initial state. For the other trials, `later`
    is the reduction of cost, `smaller` that of the perturbation, and `scaled` that of cost with a ranking by
    relative distance. `concentration` is the share of the movement in the blocks of one save. `largest` and `budget`
    are the sizes of the largest block and of a save, as fractions of all values."""

    trials: int
    whole: float
    early: int
    later: ConfidenceInterval
    smaller: float
    scaled: float | None
    concentration: float
    largest: float
    budget: float


def reduction_facts(panel: PanelComparison, strategy: Strategy, baseline: Strategy) -> ReductionFacts:
    """Return measurements that may explain the cost of `strategy` relative to that of `baseline` on `panel`."""
    measured = panel.measurement
    ours, full = measured.costs_of(strategy), measured.costs_of(baseline)
    both = np.isfinite(ours.cost) & np.isfinite(full.cost)
    early = measured.steps < baseline.policy.interval
    later = both & ~early if (both & ~early).any() else both
    scaled, relative = None, replace(strategy, policy=replace(strategy.policy, ranking="relative"))
    if relative in measured.strategies:
        costs = confidence.paired(measured.costs_of(relative).cost[later], full.cost[later])
        scaled = confidence.reduction(*costs).value
    return ReductionFacts(
        trials=len(later),
        whole=confidence.reduction(ours.whole[both], full.whole[both]).value,
        early=int(early.sum()),
        later=confidence.reduction(ours.cost[later], full.cost[later]),
        smaller=confidence.reduction(ours.size[later], full.size[later]).value,
        scaled=scaled,
        concentration=measured.concentration,
        largest=panel.largest_block,
        budget=float(strategy.policy.fraction),
    )


def explain_reduction(
    panel: PanelComparison, strategy: Strategy, baseline: Strategy, claim: Claim | None = None
) -> str:
    """Return a sentence that compares the cost of `strategy` with `baseline`; if `claim` fails, add the cause."""
    facts = reduction_facts(panel, strategy, baseline)
    policy, lost = strategy.policy, f"{strategy.lost} lost"
    name = f"{policy.name} {policy.fraction}, {lost}" if policy.fraction < 1 else lost
    if isnan(facts.later.value):
        return f"{panel.label}, {name}: full recovery cost nothing, so there is nothing to reduce."
    which = "in fractions"
    if 0 < facts.early < facts.trials:
        which = f"without the {facts.early} of {facts.trials} failures before the first full checkpoint"
    line = (
        f"{panel.label}, {name}: in whole iterations, as the paper counts, the reduction is {facts.whole:.2f}; {which} it is "
        f"{facts.later.value:.2f} ({facts.later.ends()}), and the perturbation is "
        f"{abs(facts.smaller):.0%} {'smaller' if facts.smaller >= 0 else 'larger'} than by full recovery."
    )
    if claim is None or claim.holds:
        return line
    return f"{line} {'Cause' if claim.resolved else 'Cause, if not chance'}: {cause_of(facts, claim)}"


def cause_of(facts: ReductionFacts, claim: Claim) -> str:
    """Return a clause that says why the reduction in `claim` is outside its expected range."""
    low, high = claim.expected
    if facts.early == facts.trials:
        return "every failure comes before the first full checkpoint, so full recovery starts over."
    if claim.expects(facts.later.value):
        return "the early failures, which return to the random start; without them it is in the range."
    if claim.expects(facts.whole):
        return "the counting; in whole iterations it is in the range."
    if high is not None and claim.measured > high:
        unit = (1 - facts.later.value) / (1 - facts.smaller)
        return (
            f"the surviving blocks pull the restored blocks forward: a unit of perturbation costs {unit:.0%} of what it "
            "costs under full recovery."
        )
    if facts.largest > facts.budget:
        return (
            f"one block holds {facts.largest:.0%} of the values and a save may hold {facts.budget:.1%} of them, so "
            "that block is saved no more often than by full checkpoints."
        )
    if facts.scaled is not None and claim.expects(facts.scaled):
        return (
            "distances of large and small blocks are ranked alike; ranked relative to their norms, and without early "
            f"failures, it is {facts.scaled:.2f}, in the range."
        )
    if facts.budget < 1 and low is not None and facts.smaller < low:
        return (
            f"movement is spread over the blocks, so the saves are not fresh enough: the {facts.budget:.1%} of the state "
            f"that moved most makes {facts.concentration:.0%} of the squared movement between full checkpoints."
        )
    return "not found; the perturbation shrinks as expected, and the cost does not."
