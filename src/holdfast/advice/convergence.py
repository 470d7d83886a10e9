"""The rate at which training converges, estimated from its losses.

The model: the distance to the optimum shrinks by a factor c in each step, and the loss minus its limit is the square of
that distance. Then the mean losses of three successive ranges of w steps have two differences with the ratio c^(2w).
The uncertainty of c is estimated by adding noise to the means. If many draws diverge, there is no estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.advice.estimate import INFERRED, Estimate
from holdfast.blocks.division import Floats

FEWEST = 30  # losses
DRAWS = 1000
PARTS = 10  # of each third; their means show how much the mean of the third varies


@dataclass(frozen=True, slots=True)
class Convergence:
    """The convergence of a run, as its losses show it."""

    rate: Estimate  # the factor by which the distance to the optimum shrinks in a step
    limit: float  # the loss that the run approaches
    left: Estimate  # the last loss minus `limit`
    gain: float  # by how much the next step lowers the loss


def convergence(losses: Sequence[float], seed: int = 0) -> Convergence | None:
    """Estimate how fast a run converges from the losses of consecutive steps; return None if they do not converge."""
    values = np.asarray(losses, dtype=np.float64)
    width = len(values) // 3
    if len(values) < FEWEST or not np.isfinite(values).all():
        return None
    thirds = values[len(values) - 3 * width :].reshape(3, width)
    means, errors = thirds.mean(axis=1), np.array([_error(third) for third in thirds])
    drawn = means + errors * np.random.default_rng(seed).standard_normal((DRAWS, 3))
    ratio, left = _fit(drawn)
    known = (ratio > 0) & (ratio < 1)
    ratio_here, left_here = (float(values[0]) for values in _fit(means[None]))
    if known.mean() < 0.9 or not 0 < ratio_here < 1:
        return None
    rates = ratio[known] ** (0.5 / width)
    low, high = (float(rate) for rate in np.percentile(rates, (5, 95)))
    least, most = (float(value) for value in np.percentile(left[known], (5, 95)))
    c = ratio_here ** (0.5 / width)
    rate = Estimate(c, min(low, c), max(high, c), INFERRED)
    rest = Estimate(left_here, min(least, left_here), max(most, left_here), INFERRED)
    middle = left_here / ratio_here**0.5  # the loss above the limit in the middle of the last third
    return Convergence(rate, float(means[2]) - middle, rest, left_here * (1 - c**2))


def _fit(means: Floats) -> tuple[Floats, Floats]:
    before, after = means[:, 0] - means[:, 1], means[:, 1] - means[:, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = after / before
        ratio = np.where(before > 0, ratio, np.nan)
        # The mean of a third approximates the loss in its middle; its end is half its width later.
        return ratio, after * ratio / (1 - ratio) * np.sqrt(np.clip(ratio, 0, 1))


def _error(values: Floats) -> float:
    width = len(values) // PARTS
    if width < 1:
        return float(values.std(ddof=1) / np.sqrt(len(values)))
    parts = values[: PARTS * width].reshape(PARTS, width).mean(axis=1)
    fall = np.polyval(np.polyfit(np.arange(PARTS), parts, 1), np.arange(PARTS))
    return float((parts - fall).std(ddof=2) / np.sqrt(PARTS))
