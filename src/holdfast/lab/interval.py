"""Means and reductions of paired trials, with their 95 % confidence intervals."""

from typing import NamedTuple

import numpy as np

from holdfast.blocks import Floats

RESAMPLES = 2000


class Interval(NamedTuple):
    """An estimate and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def mean(costs: Floats) -> Interval:
    """The mean cost, by the normal approximation."""
    if len(costs) < 2:
        return Interval(float(costs.mean()), float("nan"), float("nan"))
    half = 1.96 * float(costs.std(ddof=1)) / float(np.sqrt(len(costs)))
    return Interval(float(costs.mean()), float(costs.mean()) - half, float(costs.mean()) + half)


def reduction(costs: Floats, baseline: Floats, seed: int = 0) -> Interval:
    """By how much of itself the baseline's mean is reduced; resampled by trial, since both had the same failures.

    Not a number where no failure cost the baseline anything.
    """
    if not baseline.any():
        return Interval(float("nan"), float("nan"), float("nan"))
    value = _reduced(costs.mean(keepdims=True), baseline.mean(keepdims=True))[0]
    drawn = np.random.default_rng(seed).integers(len(costs), size=(RESAMPLES, len(costs)))
    low, high = np.nanpercentile(_reduced(costs[drawn].mean(axis=1), baseline[drawn].mean(axis=1)), [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def _reduced(costs: Floats, baseline: Floats) -> Floats:
    return 1 - costs / np.where(baseline == 0, np.nan, baseline)
