"""Remarks on costs that are not as expected."""

import numpy as np

from holdfast.lab.bounds.cost_bound import Contraction
from holdfast.lab.partial.comparison import Costs, Measurement, PanelComparison
from holdfast.lab.partial.cost_report import explain_reduction
from holdfast.lab.partial.partial_recovery import LOST, strategy


def test_a_reduction_is_given_in_whole_iterations_and_without_early_failures() -> None:
    half, all_lost = (strategy("partial", lost, 8) for lost in (LOST[1], LOST[3]))
    costs = {half: (4.0, 1.0, 1.0), all_lost: (2.0, 4.0, 4.0)}
    measured = Measurement(
        lengths=np.array([20, 20, 20]),
        steps=np.array([3, 12, 14]),
        rate=Contraction(0.9, 1.0, True, 0.9, 0.9),
        strategies={each.canonical: Costs(*[np.array(numbers)] * 4) for each, numbers in costs.items()},
    )
    line = explain_reduction(PanelComparison("mf", "mf-small", False, 1.0, measured, []), half, all_lost)
    assert line == (
        "mf, 1/2 lost: in whole iterations, as the paper counts, the reduction is 0.40; without the 1 of 3 failures before "
        "the first full checkpoint it is 0.75 (interval unknown), and the perturbation is 75% smaller than by full recovery."
    )
