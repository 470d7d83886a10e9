"""A claim that fails is explained by the first cause that the measurements show."""

from dataclasses import replace

import numpy as np
import pytest

from holdfast.lab.bounds.cost_bound import Contraction
from holdfast.lab.confidence import ConfidenceInterval
from holdfast.lab.partial.comparison import Costs, Measurement, PanelComparison
from holdfast.lab.partial.cost_report import IN_RANGE, ReductionFacts, cause_of, cheapest, why
from holdfast.lab.partial.partial_recovery import LOST, rises, strategy
from holdfast.lab.result import Claim

FACTS = ReductionFacts(
    trials=100,
    whole=0.6,
    early=20,
    later=ConfidenceInterval(0.6, 0.5, 0.7),
    smaller=0.55,
    scaled=0.5,
    concentration=0.4,
    largest=0.01,
    budget=0.125,
)


def failing(measured: float) -> Claim:
    return Claim(id="a", claim="b", source="c", expected=(0.78, 0.95), measured=measured)


@pytest.mark.parametrize(
    ("facts", "measured", "cause"),
    [
        (replace(FACTS, early=100), 0.6, "every failure is early"),
        (
            replace(FACTS, later=ConfidenceInterval(0.8, 0.7, 0.9)),
            0.6,
            "after early failures, blocks return to their initial values",
        ),
        (replace(FACTS, whole=0.8), 0.6, "costs are counted in fractions of an iteration"),
        (FACTS, 0.97, "the reduction is larger than expected, because the surviving blocks help"),
        (replace(FACTS, largest=0.7), 0.6, "one block has 70% of all values"),
        (replace(FACTS, scaled=0.83), 0.6, "changes of large and small blocks are ranked alike"),
        (FACTS, 0.6, "the changes are spread over many blocks"),
        (replace(FACTS, scaled=None), 0.6, "the changes are spread over many blocks"),
        (replace(FACTS, smaller=0.8), 0.47, "not found"),
        (replace(FACTS, budget=1), 0.6, "not found"),
    ],
)
def test_the_cause_is_the_first_that_explains_the_result(facts: ReductionFacts, measured: float, cause: str) -> None:
    assert cause_of(facts, failing(measured)).startswith(cause)


def test_an_unresolved_claim_gets_a_reason_even_if_its_value_is_in_the_range() -> None:
    inside = replace(failing(0.85), interval=(0.8, 0.9))
    assert why(FACTS, inside) == ""
    assert why(FACTS, replace(inside, interval=(0.7, 0.9))) == f"not resolved: {IN_RANGE}"
    assert why(FACTS, replace(inside, measured=0.6, interval=(0.5, 0.8))).startswith(
        "not resolved, by chance or because: "
    )
    assert why(FACTS, replace(inside, measured=0.6, interval=(0.5, 0.7))).startswith("does not hold: ")
    assert why(FACTS, None) == ""


def test_a_smaller_loss_that_costs_more_is_explained_by_its_failures() -> None:
    measured = Measurement(
        lengths=np.array([20, 20]),
        steps=np.array([3, 12]),
        rate=Contraction(0.9, 1.0, True, 0.9, 0.9),
        concentration=0.5,
        strategies={
            strategy("partial", lost, 8).canonical: Costs(*[np.array(costs)] * 4)
            for lost, costs in zip(LOST, [(1.0, 1.0), (2.0, 2.0), (6.0, 2.0), (3.0, 4.0)], strict=True)
        },
    )
    (line,) = rises(PanelComparison("mf", "mf-small", False, 1.0, 0.1, measured, []), 8)
    assert line.startswith("mf: under partial recovery, losing 3/4 of the blocks costs 0.50 iterations")
    assert line.endswith("Early failures cost 6.00 and 3.00 iterations, and late failures 2.00 and 4.00.")


def test_the_cheapest_strategy_is_named_with_the_strategies_that_may_be_as_cheap() -> None:
    rng = np.random.default_rng(1)
    failures = rng.exponential(4, size=40)
    costs = {"dear": failures + 3, "like it": failures + rng.normal(0, 1, 40), "cheap": failures - 0.05}
    first, second = ("cheap", "like it") if costs["cheap"].mean() < costs["like it"].mean() else ("like it", "cheap")
    assert cheapest(costs) == (first, [second])


def test_the_same_failures_resolve_a_difference_that_is_smaller_than_their_spread() -> None:
    failures = np.random.default_rng(1).exponential(4, size=40)
    noise = np.random.default_rng(2).normal(0, 0.1, size=40)
    assert cheapest({"a": failures, "b": failures + 0.2 + noise}) == ("a", [])


def test_a_strategy_of_which_no_trial_converged_is_never_the_cheapest() -> None:
    assert cheapest({"never": np.full(6, np.inf), "always": np.arange(6.0)}) == ("always", ["never"])
