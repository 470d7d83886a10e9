"""Means, medians and reductions over trials, with 95 % confidence intervals."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from holdfast.blocks.division import Floats

RESAMPLES = 2000
FEWEST = 5  # trials; resampling fewer says nothing about their spread
# Student's t at 97.5 %, for 1 degree of freedom and up; from 30 on the normal quantile is within 4 % of it.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
            2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip


class ConfidenceInterval(NamedTuple):
    """An estimate with the ends of its 95 % confidence interval; an unknown end is NaN."""

    value: float
    low: float
    high: float

    def ends(self, spec: str = ".2f") -> str:
        return ends_text(self.low, self.high, spec)


def ends_text(low: float, high: float, spec: str = ".2f") -> str:
    """Return an interval as text, such as "0.54 to 1.01", or "interval unknown" if an end is NaN.

    `spec` formats both ends."""
    return "interval unknown" if np.isnan(low) or np.isnan(high) else f"{low:{spec}} to {high:{spec}}"


_UNKNOWN = ConfidenceInterval(float("nan"), float("nan"), float("nan"))


def mean(values: Floats) -> ConfidenceInterval:
    """Return the mean of `values` with a 95 % interval by Student's t.

    The ends are NaN for a single value, and for fewer than `FEWEST` values that are all equal."""
    if not len(values):
        return _UNKNOWN
    center, count = float(values.mean()), len(values)
    if count < 2 or (count < FEWEST and np.ptp(values) == 0):
        return ConfidenceInterval(center, float("nan"), float("nan"))
    half = _quantile(count) * float(values.std(ddof=1)) / float(np.sqrt(count))
    return ConfidenceInterval(center, center - half, center + half)


def _quantile(count: int) -> float:
    return _STUDENT[count - 2] if count <= len(_STUDENT) + 1 else 1.96


def median(rounds: Floats, seed: int = 0) -> ConfidenceInterval:
    """Return the median of all values in `rounds` with a bootstrap interval; each row is one round of measurements.

    Whole rows are resampled, because the values of one round correlate. With fewer than `FEWEST` rows, the ends are
    NaN."""
    if len(rounds) < FEWEST:
        return ConfidenceInterval(float(np.median(rounds)), float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    low, high = np.percentile(np.median(rounds[drawn].reshape(RESAMPLES, -1), axis=1), [2.5, 97.5])
    return ConfidenceInterval(float(np.median(rounds)), float(low), float(high))


def finite(costs: Floats) -> Floats:
    """Return the costs of the trials that converged; a trial that did not converge has an infinite cost."""
    return costs[np.isfinite(costs)]


def paired(costs: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Return `costs` and `others`, two strategies' costs by trial, for the trials that converged under both of them."""
    both = np.isfinite(costs) & np.isfinite(others)
    return costs[both], others[both]


def reduction(costs: Floats, baseline: Floats, seed: int = 0) -> ConfidenceInterval:
    """Return the fraction by which the mean of `costs` is below the mean of `baseline`, with a bootstrap interval.

    Entry i of both arrays must be the cost of the same failure, because pairs of entries are resampled."""
    if not baseline.any():
        return _UNKNOWN
    value = _reduced(costs.mean(keepdims=True), baseline.mean(keepdims=True))[0]
    if len(costs) < FEWEST:
        return ConfidenceInterval(float(value), float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(len(costs), size=(RESAMPLES, len(costs)))
    resampled = _reduced(costs[drawn].mean(axis=1), baseline[drawn].mean(axis=1))
    low, high = np.nanpercentile(resampled, _percentiles(len(costs)))
    return ConfidenceInterval(float(value), float(low), float(high))


def _percentiles(count: int) -> tuple[float, float]:
    """Return the two percentiles of bootstrap means that bound a 95 % interval.

    They are 2.5 and 97.5 for many values, and further apart if `count`, the number of values, is small."""
    if count > len(_STUDENT) + 1:
        return 2.5, 97.5
    tail = 100 * NormalDist().cdf(-_quantile(count) * (count / (count - 1)) ** 0.5)
    return tail, 100 - tail


def _reduced(costs: Floats, baseline: Floats) -> Floats:
    return 1 - costs / np.where(baseline == 0, np.nan, baseline)
