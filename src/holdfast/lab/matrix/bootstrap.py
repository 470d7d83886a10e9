"""Confidence intervals over seeds: the runs of each suite are drawn again, seed by seed, and the figure computed anew.

Runs of one seed stay together, whatever their variant: they began with the same weights and found the machine alike.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from holdfast.blocks.division import Floats
from holdfast.lab.interval import RESAMPLES, Interval

Figure: TypeAlias = Callable[[Sequence[Floats]], Floats]
"""From the means of every suite, each as (draw, column), to a number for every draw."""


def interval(suites: Sequence[Floats], figure: Figure, seed: int = 0) -> Interval:
    """A figure of suites, each an array of (seed, column), with its 95 % interval; with one seed a suite there is none."""
    value = float(figure([rows.mean(axis=0, keepdims=True) for rows in suites])[0])
    if any(len(rows) < 2 for rows in suites):
        return Interval(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    drawn = [rows[rng.integers(len(rows), size=(RESAMPLES, len(rows)))].mean(axis=1) for rows in suites]
    low, high = np.percentile(figure(drawn), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def gain(suites: Sequence[Floats]) -> Floats:
    """The mean over the suites of what the first column is above the second, in proportion to the second."""
    return np.asarray(np.mean([rows[:, 0] / rows[:, 1] - 1 for rows in suites], axis=0))


def difference(suites: Sequence[Floats]) -> Floats:
    """The mean over the suites of the first column less the second."""
    return np.asarray(np.mean([rows[:, 0] - rows[:, 1] for rows in suites], axis=0))


def reduction(suites: Sequence[Floats]) -> Floats:
    """By how much of itself the second column is reduced in the first, as the means over the suites say."""
    less, more = (np.mean([rows[:, at] for rows in suites], axis=0) for at in (0, 1))
    return np.asarray(1 - less / more)


def share_above(suites: Sequence[Floats]) -> Floats:
    """The share of the suites in which the first column is above the second."""
    return np.asarray(np.mean([rows[:, 0] > rows[:, 1] for rows in suites], axis=0))
