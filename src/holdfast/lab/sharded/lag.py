"""The lag of a disturbed training run: how many steps the run is behind the undisturbed run on the same batches.

Both runs see the same batches and are measured on the same text, so most noise is in both and cancels in the
difference of their losses. A loss is that of the mean of the weights over some steps, which leaves out what single
steps add and take away again. The trend of the undisturbed run translates this excess loss into steps: the lag is the
number of steps by which the trend must be delayed to be as much higher.

The loss of a run falls ever more slowly, so the trend at a step is a line through the losses within a quarter of that
step: near the end of a run, a narrower range has more noise than slope, and a flat part would turn any excess into a
long lag.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Floats

WITHIN = 0.25  # of the step at which the trend is fitted
FEWEST = 3  # losses on each side of it


@dataclass(frozen=True, slots=True, eq=False)
class LossCurve:
    """Validation losses after given numbers of steps, in increasing order."""

    steps: npt.NDArray[Any]
    losses: Floats

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> "LossCurve":
        """Return the curve through `points`, pairs of a step and a loss."""
        return cls(np.array([step for step, _ in points]), np.array([loss for _, loss in points], dtype=np.float64))

    def points(self) -> list[tuple[int, float]]:
        return list(zip(self.steps.tolist(), self.losses.tolist(), strict=True))

    def at(self, steps: npt.NDArray[Any]) -> Floats:
        """Return the losses after `steps`, interpolated; before the first step and after the last one it is constant."""
        return np.asarray(np.interp(steps, self.steps, self.losses))


def trend(curve: LossCurve) -> LossCurve:
    """Return the falling curve that is nearest to the lines fitted to `curve` around each of its points."""
    from scipy.optimize import isotonic_regression  # takes half a second

    return LossCurve(curve.steps, np.asarray(isotonic_regression(_fitted_lines(curve), increasing=False).x))


def _fitted_lines(curve: LossCurve) -> Floats:
    """Return at each step of `curve` the value of a line that is fitted to the losses nearby; near ones count more."""
    steps = np.asarray(curve.steps, dtype=np.float64)
    spacing = float(np.diff(steps).max(initial=1.0))
    away = steps[None, :] - steps[:, None]
    weights = np.clip(1 - np.abs(away) / np.maximum(WITHIN * steps, (FEWEST + 1) * spacing)[:, None], 0, None)
    total, first, second = weights.sum(axis=1), (weights * away).sum(axis=1), (weights * away**2).sum(axis=1)
    levels, tilts = weights @ curve.losses, (weights * away) @ curve.losses
    spread = total * second - first**2
    lines = second * levels - first * tilts
    return np.asarray(np.where(spread > 0, lines / np.where(spread > 0, spread, 1), levels / total))


def lag(reference: LossCurve, run: LossCurve) -> float:
    """Return how many steps `run` is behind `reference`; below 0 if it is ahead.

    0 for equal losses. No lag is longer than the run itself, and none is shorter than the rest of the reference."""
    falling = trend(reference)
    excess = float(np.mean(run.losses - reference.at(run.steps)))
    delays = np.arange(int(run.steps[-1] - reference.steps[-1]), int(run.steps[-1] - reference.steps[0]) + 1)
    levels = falling.at(run.steps[None, :] - delays[:, None]).mean(axis=1)
    raised = levels - falling.at(run.steps).mean()
    # Where the trend is flat, all delays are equally good; a tiny slope makes the excess 0 mean the delay 0.
    slope = 1e-9 * max(float(np.ptp(falling.losses)), 1e-30)
    worst = np.inf if np.isnan(excess) else excess
    return float(np.interp(worst, raised + slope * delays, delays))
