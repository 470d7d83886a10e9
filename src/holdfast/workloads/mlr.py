"""Multinomial logistic regression by mini-batch gradient descent; an iteration is one pass over the data.

One matrix product serves every trial of a stack: the weights of all classes and trials stand side by side as columns.
Scores then have the axes class, trial, sample, and everything done to them runs over long rows of samples. Features
that are zero in a whole chunk of samples, as most pixels at the border are, take no part in its products.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.blocks import Blocks, Floats, Norm, along, euclidean
from holdfast.errors import BadInput
from holdfast.workloads.datasets import Dataset, load
from holdfast.workloads.workload import Arrays, Clock, Stack

_ROWS = 2000  # samples handled at once: enough for efficient products, few enough for scores to stay in the cache


class _Chunk(NamedTuple):
    """Samples of one batch: the features that are not zero in all of them, their values, and the classes."""

    features: npt.NDArray[np.int64]
    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LogisticRegression:
    """The multi-logit model with gradients summed over a batch; the loss is the total cross-entropy over the data."""

    data: Dataset
    batch: int
    rate: float
    criterion: float
    lanes: int = 16
    stochastic: bool = False
    steady: bool = True
    norm: Norm = field(default=euclidean, repr=False)

    @property
    def name(self) -> str:
        """`mlr-` and the data set."""
        return f"mlr-{self.data.name}"

    @cached_property
    def blocks(self) -> Blocks:
        """Every row of the weight matrix, that is every feature, is a block."""
        return along(self.start(), "weights")

    def start(self, stream: int = 0) -> Arrays:
        """All weights zero."""
        return {"weights": np.zeros((self.data.x.shape[1], self.data.classes), dtype=np.float32)}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        """One pass over the data, batch by batch in their own order."""
        weights = stack["weights"].reshape(len(stack["weights"]), -1).copy()
        for batch in self._batches:
            gradient = np.zeros_like(weights)
            for chunk in batch:
                error = _probabilities_minus_truth(self._scores(weights, chunk), chunk.y)
                gradient[chunk.features] += chunk.x.T @ error.reshape(-1, len(chunk.y)).T
            weights -= np.float32(self.rate) * gradient
        return {"weights": weights.reshape(stack["weights"].shape)}

    def loss(self, stack: Stack) -> Floats:
        """Total cross-entropy, summed in double precision."""
        weights = stack["weights"].reshape(len(stack["weights"]), -1)
        total = np.zeros(stack["weights"].shape[-1])
        for batch in self._batches:
            for chunk in batch:
                total += _cross_entropy(self._scores(weights, chunk), chunk.y)
        return total

    def _scores(self, weights: npt.NDArray[Any], chunk: _Chunk) -> npt.NDArray[Any]:
        """The scores of some samples, with axes class, trial, sample."""
        return np.asarray(weights[chunk.features].T @ chunk.x.T).reshape(self.data.classes, -1, len(chunk.y))

    @cached_property
    def _batches(self) -> Sequence[Sequence[_Chunk]]:
        """Every batch in chunks; its samples sorted by class, since those of one class have more zeros in common."""
        starts = range(0, len(self.data.y), self.batch)
        return [self._chunks(np.arange(first, min(first + self.batch, len(self.data.y)))) for first in starts]

    def _chunks(self, samples: npt.NDArray[np.int64]) -> Sequence[_Chunk]:
        samples = samples[np.argsort(self.data.y[samples], kind="stable")]
        parts = [samples[first : first + _ROWS] for first in range(0, len(samples), _ROWS)]
        return [_chunk(self.data.x[part], self.data.y[part]) for part in parts]


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


def _chunk(x: npt.NDArray[np.float32], y: npt.NDArray[np.int64]) -> _Chunk:
    features = np.flatnonzero(x.any(axis=0))
    return _Chunk(features, np.ascontiguousarray(x[:, features]), y)


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
