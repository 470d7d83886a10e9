"""A claim that fails is given the cause that the measurements beside it show, and no other."""

from dataclasses import replace

import pytest

from holdfast.lab.cause import Facts, cause
from holdfast.lab.interval import Interval
from holdfast.lab.result import Claim

FACTS = Facts(trials=100, early=20, later=Interval(0.6, 0.5, 0.7), whole=0.6, smaller=0.55, largest=0.01, budget=0.125)


def failing(measured: float) -> Claim:
    return Claim(id="a", claim="b", source="c", expected=(0.78, 0.95), measured=measured)


@pytest.mark.parametrize(
    ("found", "measured", "says"),
    [
        (replace(FACTS, later=Interval(0.8, 0.7, 0.9)), 0.6, "Cause: the early failures"),
        (replace(FACTS, whole=0.8), 0.6, "Cause: the counting"),
        (FACTS, 0.97, "Cause: the failures cost less than the paper's"),
        (replace(FACTS, largest=0.7), 0.6, "Cause: one block holds 70% of the values"),
        (FACTS, 0.6, "Cause: the saves are not fresh enough"),
        (replace(FACTS, smaller=0.74), 0.47, "Cause not found"),
        (replace(FACTS, later=None), 0.6, "Cause: the saves are not fresh enough"),
    ],
)
def test_the_cause_is_the_first_that_explains_the_result(found: Facts, measured: float, says: str) -> None:
    assert cause(found, failing(measured)).startswith(says)
