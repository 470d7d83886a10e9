"""Multinomial logistic regression by mini-batch gradient descent; an iteration is one pass over the data.

One matrix product serves every trial of a stack: the weights of all trials and classes stand one below the other as
its rows. Scores then have the axes class, trial, sample, and everything done to them runs over long rows of samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.blocks import Blocks, Floats, Norm, along, euclidean
from holdfast.errors import BadInput
from holdfast.workloads.datasets import Dataset, load
from holdfast.workloads.workload import Arrays, Clock, Stack

_ROWS = 500  # rows handled at once, so that the scores of a whole stack stay in the processor's cache


@dataclass(frozen=True, eq=False)
class LogisticRegression:
    """The multi-logit model with gradients summed over a batch; the loss is the total cross-entropy over the data."""

    data: Dataset
    batch: int
    rate: float
    criterion: float
    lanes: int = 32
    stochastic: bool = False
    norm: Norm = field(default=euclidean, repr=False)

    @property
    def name(self) -> str:
        """`mlr-` and the data set."""
        return f"mlr-{self.data.name}"

    @cached_property
    def blocks(self) -> Blocks:
        """Every row of the weight matrix, that is every feature, is a block."""
        return along(self.start(), "weights")

    def start(self) -> Arrays:
        """All weights zero."""
        return {"weights": np.zeros((self.data.x.shape[1], self.data.classes), dtype=np.float32)}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        """One pass over the data in its own order."""
        weights = _as_rows(stack)
        for first in range(0, len(self.data.y), self.batch):
            gradient = np.zeros_like(weights)
            for x, y in self._chunks(first, first + self.batch):
                error = _probabilities_minus_truth(self._scores(weights, x), y)
                gradient += error.reshape(len(weights), -1) @ x
            weights -= np.float32(self.rate) * gradient
        return {"weights": _as_stack(weights, stack["weights"].shape)}

    def loss(self, stack: Stack) -> Floats:
        """Total cross-entropy, summed in double precision."""
        weights, total = _as_rows(stack), np.zeros(stack["weights"].shape[-1])
        for x, y in self._chunks(0, len(self.data.y)):
            total += _cross_entropy(self._scores(weights, x), y)
        return total

    def _scores(self, weights: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The scores of some samples, with axes class, trial, sample."""
        return np.asarray(weights @ x.T).reshape(self.data.classes, -1, len(x))

    def _chunks(self, first: int, last: int) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        last = min(last, len(self.data.y))
        for row in range(first, last, _ROWS):
            rows = slice(row, min(row + _ROWS, last))
            yield self.data.x[rows], self.data.y[rows]


# Batch, learning rate and criterion of each data set: of the paper's appendix C for MNIST and CoverType; ours for the
# embedded digits, chosen so that an unperturbed run converges in about as many iterations as the paper's do.
SETTINGS: dict[str, tuple[int, float, float]] = {
    "mnist": (10_000, 1e-5, 2.5e4),
    "covtype": (1_000, 1e-7, 6.7e5),
    "digits": (300, 1e-3, 4.5e2),
}


def mlr(name: str, data: Path | None = None) -> LogisticRegression:
    """The model on a data set by name, with the settings that belong to it."""
    if name not in SETTINGS:
        raise BadInput(f"there are no MLR settings for {name!r}; choose one of {', '.join(SETTINGS)}")
    batch, rate, criterion = SETTINGS[name]
    return LogisticRegression(load(name, data), batch, rate, criterion)


def _as_rows(stack: Stack) -> npt.NDArray[Any]:
    """A copy of the weights with a row for each class of each trial."""
    features, classes, lanes = stack["weights"].shape
    return np.array(stack["weights"].transpose(1, 2, 0), order="C").reshape(classes * lanes, features)


def _as_stack(rows: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The inverse of `_as_rows`."""
    features, classes, lanes = shape
    return np.ascontiguousarray(rows.reshape(classes, lanes, features).transpose(2, 0, 1))


def _probabilities_minus_truth(scores: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The derivative of the cross-entropy by the scores, which are overwritten."""
    scores -= scores.max(axis=0)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=0)
    scores[y, :, np.arange(len(y))] -= 1
    return scores


def _cross_entropy(scores: npt.NDArray[Any], y: npt.NDArray[Any]) -> Floats:
    """The cross-entropy of every trial; the scores are overwritten."""
    highest, truth = scores.max(axis=0), scores[y, :, np.arange(len(y))].T
    scores -= highest
    np.exp(scores, out=scores)
    return np.asarray((np.log(scores.sum(axis=0)) + highest - truth).sum(axis=1, dtype=np.float64))
