"""Means and reductions of paired trials, with their 95 % confidence intervals."""

from typing import NamedTuple

import numpy as np

from holdfast.blocks.division import Floats

RESAMPLES = 2000
# Student's t at 97.5 %, for 1 degree of freedom and up; from 30 on the normal quantile is within 4 % of it.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
            2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045)  # fmt: skip


class ConfidenceInterval(NamedTuple):
    """An estimate and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float


def mean(costs: Floats) -> ConfidenceInterval:
    """The mean cost, by the normal approximation; not a number without any."""
    if not len(costs):
        return ConfidenceInterval(float("nan"), float("nan"), float("nan"))
    if len(costs) < 2:
        return ConfidenceInterval(float(costs.mean()), float("nan"), float("nan"))
    half = 1.96 * float(costs.std(ddof=1)) / float(np.sqrt(len(costs)))
    return ConfidenceInterval(float(costs.mean()), float(costs.mean()) - half, float(costs.mean()) + half)


def mean_of_few(values: Floats) -> ConfidenceInterval:
    """The mean of few trials, by Student's t; a single trial says nothing of where the mean lies."""
    if len(values) < 2 or len(values) > len(_STUDENT) + 1:
        return mean(values)
    half = _STUDENT[len(values) - 2] * float(values.std(ddof=1)) / float(np.sqrt(len(values)))
    return ConfidenceInterval(float(values.mean()), float(values.mean()) - half, float(values.mean()) + half)


def median(rounds: Floats, seed: int = 0) -> ConfidenceInterval:
    """The median over all values, resampled by round: values of one round (a row) were measured together."""
    drawn = np.random.default_rng(seed).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    low, high = np.percentile(np.median(rounds[drawn].reshape(RESAMPLES, -1), axis=1), [2.5, 97.5])
    return ConfidenceInterval(float(np.median(rounds)), float(low), float(high))


def finite(costs: Floats) -> Floats:
    """The costs of trials that converged."""
    return costs[np.isfinite(costs)]


def paired(costs: Floats, others: Floats) -> tuple[Floats, Floats]:
    """The trials that converged both times: one that never did has no difference to another."""
    both = np.isfinite(costs) & np.isfinite(others)
    return costs[both], others[both]


def reduction(costs: Floats, baseline: Floats, seed: int = 0) -> ConfidenceInterval:
    """By how much of itself the baseline's mean is reduced; resampled by trial, since both had the same failures.

    Not a number where no failure cost the baseline anything.
    """
    if not baseline.any():
        return ConfidenceInterval(float("nan"), float("nan"), float("nan"))
    value = _reduced(costs.mean(keepdims=True), baseline.mean(keepdims=True))[0]
    drawn = np.random.default_rng(seed).integers(len(costs), size=(RESAMPLES, len(costs)))
    low, high = np.nanpercentile(_reduced(costs[drawn].mean(axis=1), baseline[drawn].mean(axis=1)), [2.5, 97.5])
    return ConfidenceInterval(float(value), float(low), float(high))


def _reduced(costs: Floats, baseline: Floats) -> Floats:
    return 1 - costs / np.where(baseline == 0, np.nan, baseline)
