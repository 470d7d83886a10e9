"""Why a reduction lies outside the range that a paper gives: what was measured beside it, and which of that explains it."""

from dataclasses import dataclass

from holdfast.lab import interval
from holdfast.lab.comparison import Compared
from holdfast.lab.interval import Interval
from holdfast.lab.result import Claim
from holdfast.simulate.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Facts:
    """What may explain the reduction of one strategy on one panel, each measured on the same trials."""

    trials: int
    early: int  # failures before the first full checkpoint, which go back to the start
    later: Interval | None  # the reduction without them; None where they are all or none
    whole: float  # the reduction if costs are counted in whole iterations, as in the paper
    smaller: float  # by how much of itself the perturbation shrinks, on average
    largest: float  # the largest block, as a fraction of all values
    budget: float  # what one save may hold, as a fraction of all values


def facts(compared: Compared, strategy: Strategy, baseline: Strategy) -> Facts:
    """Look at the trials of a strategy from every side that may explain their costs."""
    measured = compared.measurement
    ours, full = measured.of(strategy), measured.of(baseline)
    later = measured.steps >= baseline.policy.interval
    some = later.any() and not later.all()
    return Facts(
        trials=len(later),
        early=int((~later).sum()),
        later=interval.reduction(ours.cost[later], full.cost[later]) if some else None,
        whole=interval.reduction(ours.whole, full.whole).value,
        smaller=float(1 - ours.size.mean() / full.size.mean()),
        largest=compared.largest,
        budget=float(strategy.policy.fraction),
    )


def remark(compared: Compared, strategy: Strategy, baseline: Strategy, claim: Claim) -> str:
    """The facts beside a claim, and for one that does not hold the cause that they show."""
    found = facts(compared, strategy, baseline)
    line = (
        f"{compared.label}, {_named(strategy)}: the perturbation is {found.smaller:.0%} smaller than by full recovery"
    )
    if found.later:
        line += (
            f"; without the {found.early} of {found.trials} failures before the first full checkpoint the reduction is "
            f"{found.later.value:.2f} ({found.later.low:.2f} to {found.later.high:.2f})"
        )
    line += f"; in whole iterations, as the paper counts, it is {found.whole:.2f}."
    return line if claim.holds or not claim.resolved else f"{line} {cause(found, claim)}"


def cause(found: Facts, claim: Claim) -> str:
    """What takes a reduction out of the expected range, in one sentence."""
    _, high = claim.expected
    if found.later and claim.expects(found.later.value):
        return "Cause: the early failures, which go back to the random start; without them it is in the range."
    if claim.expects(found.whole):
        return "Cause: the counting; in whole iterations it is in the range."
    if high is not None and claim.measured > high:
        return f"Cause: the failures cost less than the paper's; they perturb by {found.smaller:.0%} less than full recovery."
    if found.largest > found.budget:
        return (
            f"Cause: one block holds {found.largest:.0%} of the values and a save may hold {found.budget:.1%} of them, so "
            "that block is saved no more often than by full checkpoints."
        )
    if claim.measured < found.smaller:
        return "Cause not found: the cost shrinks by less than the perturbation does."
    return "Cause: the saves are not fresh enough; the perturbation shrinks by less than the expected reduction."


def _named(strategy: Strategy) -> str:
    policy = strategy.policy
    return (
        f"{policy.ranking} {policy.fraction}, {strategy.lost} lost" if policy.fraction < 1 else f"{strategy.lost} lost"
    )
