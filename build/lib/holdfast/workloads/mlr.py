"""Multinomial logistic regression by mini-batch gradient descent; an iteration is one pass over the data.

One matrix product serves all trials of a stack: the weights of all classes and trials are columns. Features that are
zero in a whole chunk of samples, as most pixels at the border are, are left out of its products.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Blocks, Floats, Ids, Norm, along, euclidean
from holdfast.workloads.datasets import LabeledData, load
from holdfast.workloads.divided import DividedDefaults, Push, RoundId, share
from holdfast.workloads.workload import Arrays, Clock, Stack

_ROWS = 2000  # samples handled at once: enough for efficient products, few enough for scores to stay in the cache


class _Chunk(NamedTuple):
    """Some samples of a batch: their classes `y`, and the values `x` of their `features`.

    `features` leaves out every feature that is zero in all of these samples."""

    features: Ids
    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]


_Batch: TypeAlias = Sequence[_Chunk]


class _Part(NamedTuple):
    """A worker's slice of each batch, and the features that it needs for the slice (`pulls`).

    The last entry of `batches` and of `pulls` is for the loss."""

    batches: list[_Batch]
    pulls: list[Ids]


@dataclass(frozen=True, eq=False)
class LogisticRegression(DividedDefaults):
    """Multinomial logistic regression by gradient descent; the loss is the cross-entropy, summed over samples."""

    data: LabeledData
    batch: int
    rate: float
    criterion: float
    lanes: int = 16
    stochastic: bool = False
    steady: bool = True
    norm: Norm = field(default=euclidean, repr=False)

    @property
    def name(self) -> str:
        return f"mlr-{self.data.name}"

    @cached_property
    def blocks(self) -> Blocks:
        return along(self.start(), "weights")

    def start(self, stream: int = 0) -> Arrays:
        return {"weights": np.zeros((self.data.x.shape[1], self.data.classes), dtype=np.float32)}

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        weights = stack["weights"].reshape(len(stack["weights"]), -1).copy()
        for batch in self._batches:
            weights -= np.float32(self.rate) * self._gradient(weights, batch)
        return {"weights": weights.reshape(stack["weights"].shape)}

    def loss(self, stack: Stack) -> Floats:
        weights = stack["weights"].reshape(len(stack["weights"]), -1)
        return self._cross_entropy(weights, chain.from_iterable(self._batches))

    def survivors(self, ids: Ids, held: Arrays) -> Arrays:
        return {}

    def fresh(self, ids: Ids, summary: Arrays, iteration: int, stream: int) -> Arrays:
        return {"weights": np.zeros((len(ids), self.data.classes), np.float32)}

    @property
    def rounds(self) -> int:
        return len(range(0, len(self.data.y), self.batch))

    def part(self, worker: int, workers: int) -> _Part:
        batches = [self._chunks(batch[share(len(batch), worker, workers)]) for batch in self._samples]
        batches.append(list(chain.from_iterable(batches)))
        parts = _Part([], [])
        for batch in batches:
            pulls = np.unique(np.concatenate([np.zeros(0, np.int64), *(chunk.features for chunk in batch)]))
            renumbered = [chunk._replace(features=np.searchsorted(pulls, chunk.features)) for chunk in batch]
            parts.batches.append(renumbered)
            parts.pulls.append(pulls)
        return parts

    def pulls(self, part: _Part, round: int) -> Ids:
        return part.pulls[round]

    def compute(self, part: _Part, when: RoundId, pulled: Arrays, summed: Arrays) -> Push:
        gradient = self._gradient(self._weights(pulled), part.batches[when.round])
        return Push(part.pulls[when.round], {"weights": gradient})

    def apply(self, when: RoundId, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        held["weights"] -= np.float32(self.rate) * pushed["weights"]

    def measure(self, part: _Part, pulled: Arrays, summed: Arrays) -> float:
        return float(self._cross_entropy(self._weights(pulled), part.batches[self.rounds])[0])

    def _gradient(self, weights: npt.NDArray[Any], batch: _Batch) -> npt.NDArray[Any]:
        gradient = np.zeros_like(weights)
        for chunk in batch:
            error = self._scores(weights, chunk)  # becomes the probabilities, minus 1 for the true class
            error -= error.max(axis=0)
            np.exp(error, out=error)
            error /= error.sum(axis=0)
            error[chunk.y, :, np.arange(len(chunk.y))] -= 1
            gradient[chunk.features] += chunk.x.T @ error.reshape(-1, len(chunk.y)).T
        return gradient

    def _cross_entropy(self, weights: npt.NDArray[Any], chunks: Iterable[_Chunk]) -> Floats:
        return sum((_cross_entropy(self._scores(weights, chunk), chunk.y) for chunk in chunks), np.zeros(1))

    def _scores(self, weights: npt.NDArray[Any], chunk: _Chunk) -> npt.NDArray[Any]:
        return np.asarray(weights[chunk.features].T @ chunk.x.T).reshape(self.data.classes, -1, len(chunk.y))

    def _weights(self, pulled: Arrays) -> npt.NDArray[Any]:
        return pulled["weights"] if pulled else np.zeros((0, self.data.classes), np.float32)

    @cached_property
    def _batches(self) -> Sequence[_Batch]:
        return [self._chunks(batch) for batch in self._samples]

    @property
    def _samples(self) -> Sequence[Ids]:
        starts = range(0, len(self.data.y), self.batch)
        return [np.arange(first, min(first + self.batch, len(self.data.y))) for first in starts]

    def _chunks(self, samples: Ids) -> _Batch:
        """Split samples into chunks of similar classes, so that many features are zero in a whole chunk."""
        samples = samples[np.argsort(self.data.y[samples], kind="stable")]
        chunks = []
        for first in range(0, len(samples), _ROWS):
            x, y = self.data.x[samples[first : first + _ROWS]], self.data.y[samples[first : first + _ROWS]]
            features = np.flatnonzero(x.any(axis=0))
            chunks.append(_Chunk(features, np.ascontiguousarray(x[:, features]), y))
        return chunks


# Batch, learning rate and criterion of each data set: of the paper's appendix C for MNIST and CoverType; ours for the
# embedded digits, chosen so that an unperturbed run converges in about as many iterations as the paper's do.
SETTINGS: dict[str, tuple[int, float, float]] = {
    "mnist": (10_000, 1e-5, 2.5e4),
    "covtype": (1_000, 1e-7, 6.7e5),
    "digits": (300, 1e-3, 4.5e2),
}


def mlr(name: str, data: Path | None = None) -> LogisticRegression:
    batch, rate, criterion = SETTINGS[name]
    return LogisticRegression(load(name, data), batch, rate, criterion)


def _cross_entropy(scores: npt.NDArray[Any], y: npt.NDArray[Any]) -> Floats:
    highest, truth = scores.max(axis=0), scores[y, :, np.arange(len(y))].T
    scores -= highest
    np.exp(scores, out=scores)
    return np.asarray((np.log(scores.sum(axis=0)) + highest - truth).sum(axis=1, dtype=np.float64))
