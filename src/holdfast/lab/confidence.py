"""Means, medians and reductions over trials, with 95 % confidence intervals."""

from typing import NamedTuple

import numpy as np

from holdfast.blocks.division import Floats

RESAMPLES = 2000
# Student's t at 97.5 %, for 1 degree of freedom and up; from 30 on the normal quantile is within 4 % of it.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
            2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip


class ConfidenceInterval(NamedTuple):
    """An estimate with the ends of its 95 % confidence interval; an unknown end is NaN."""

    value: float
    low: float
    high: float


_UNKNOWN = ConfidenceInterval(float("nan"), float("nan"), float("nan"))


def mean(values: Floats) -> ConfidenceInterval:
    """Return the mean of `values` with a 95 % interval by the normal approximation; all NaN if there are no values."""
    return _mean(values, 1.96) if len(values) else _UNKNOWN


def mean_of_few(values: Floats) -> ConfidenceInterval:
    """Return the mean of `values` with a 95 % interval by Student's t; from 31 values on, the same as `mean`."""
    if len(values) < 2 or len(values) > len(_STUDENT) + 1:
        return mean(values)
    return _mean(values, _STUDENT[len(values) - 2])


def _mean(values: Floats, quantile: float) -> ConfidenceInterval:
    center = float(values.mean())
    if len(values) < 2:
        return ConfidenceInterval(center, float("nan"), float("nan"))
    half = quantile * float(values.std(ddof=1)) / float(np.sqrt(len(values)))
    return ConfidenceInterval(center, center - half, center + half)


def median(rounds: Floats, seed: int = 0) -> ConfidenceInterval:
    """Return the median of `rounds` with a bootstrap interval. Whole rows are resampled: values in a row correlate."""
    drawn = np.random.default_rng(seed).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    low, high = np.percentile(np.median(rounds[drawn].reshape(RESAMPLES, -1), axis=1), [2.5, 97.5])
    return ConfidenceInterval(float(np.median(rounds)), float(low), float(high))


def finite(costs: Floats) -> Floats:
    """Return the costs of the trials that converged; the others have an infinite cost."""
    return costs[np.isfinite(costs)]


def paired(costs: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Return the entries of `costs` and `others`, two strategies' costs by trial, for trials that converged in both."""
    both = np.isfinite(costs) & np.isfinite(others)
    return costs[both], others[both]


def reduction(costs: Floats, baseline: Floats, seed: int = 0) -> ConfidenceInterval:
    """Return the fraction by which the mean of `costs` is below that of `baseline`; NaN if `baseline` is all 0.

    Its interval comes from resampling trials in pairs, because entry i of both arrays has the same failure.
    """
    if not baseline.any():
        return _UNKNOWN
    value = _reduced(costs.mean(keepdims=True), baseline.mean(keepdims=True))[0]
    drawn = np.random.default_rng(seed).integers(len(costs), size=(RESAMPLES, len(costs)))
    low, high = np.nanpercentile(_reduced(costs[drawn].mean(axis=1), baseline[drawn].mean(axis=1)), [2.5, 97.5])
    return ConfidenceInterval(float(value), float(low), float(high))


def _reduced(costs: Floats, baseline: Floats) -> Floats:
    return 1 - costs / np.where(baseline == 0, np.nan, baseline)
