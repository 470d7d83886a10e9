"""Intervals over trials cover the truth as often as they say, and few trials give a wide interval or none."""

import numpy as np
import pytest

from holdfast.lab import confidence
from holdfast.lab.confidence import FEWEST


@pytest.mark.parametrize("count", [5, 8, 20, 60])
def test_the_interval_of_a_reduction_covers_the_truth_also_with_few_trials(count: int) -> None:
    rng, covered, times = np.random.default_rng(0), 0, 200
    for _ in range(times):
        baseline = rng.exponential(4, size=count)
        estimate = confidence.reduction(0.3 * baseline + rng.normal(0, 1, size=count), baseline)
        covered += estimate.low <= 0.7 <= estimate.high
    assert covered / times >= 0.88


def test_three_equal_trials_have_no_interval_of_width_zero() -> None:
    equal = np.full(3, 2.0)
    for estimate in (confidence.mean(equal), confidence.reduction(equal, 2 * equal), confidence.median(equal[:, None])):
        assert np.isfinite(estimate.value)
        assert np.isnan([estimate.low, estimate.high]).all()
        assert estimate.ends() == "interval unknown"


def test_fewer_trials_than_the_least_number_have_no_resampled_interval() -> None:
    costs = np.arange(1.0, FEWEST)
    assert np.isnan(confidence.reduction(costs, costs + 1).low)
    costs = np.arange(1.0, FEWEST + 1)
    assert np.isfinite(confidence.reduction(costs, costs + 1).low)


def test_the_mean_of_three_trials_has_the_wide_interval_of_students_t() -> None:
    value, low, high = confidence.mean(np.array([1.0, 2.0, 3.0]))
    assert (value, high - low) == (2, pytest.approx(2 * 4.303 / 3**0.5))
