"""k-means on scikit-learn's digits: a model of one's own, in one file that the simulator and the server both take.

holdfast serve train --workload examples/kmeans.py --nodes 3 --workers 2 --out runs/kmeans
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from holdfast.workloads.divided import Push, RoundId
from holdfast.workloads.model import Model

Arrays = dict[str, NDArray[np.float64]]


class KMeans(Model):
    """Every centre, a row of the array "centres", is a block: what a node loses, saves and restores."""

    criterion = 1.18e6  # the run has converged when the images' squared distances to their centres sum to less

    def __init__(self, images: NDArray[np.float64], clusters: int) -> None:
        self.images, self.clusters = images, clusters

    def start(self, stream: int = 0) -> Arrays:
        """The first images."""
        return {"centres": self.images[: self.clusters].copy()}

    def part(self, worker: int, workers: int) -> NDArray[np.float64]:
        """One worker's images."""
        return self.images[worker::workers]

    def compute(self, part: NDArray[np.float64], when: RoundId, pulled: Arrays, summed: Arrays) -> Push:
        """For every centre the sum of the images nearest to it, and beside it how many they are."""
        member = np.eye(self.clusters)[_square_distances(part, pulled["centres"]).argmin(axis=1)]
        sums = np.column_stack((member.T @ part, member.sum(axis=0)))
        return Push(np.arange(self.clusters), {"centres": sums})

    def apply(self, when: RoundId, ids: NDArray[np.int64], held: Arrays, pushed: Arrays) -> None:
        """Move every centre to the mean of its images, over all workers; one without images stays."""
        sums, counts = pushed["centres"][:, :-1], pushed["centres"][:, -1:]
        held["centres"][...] = np.where(counts > 0, sums / np.maximum(counts, 1), held["centres"])

    def measure(self, part: NDArray[np.float64], pulled: Arrays, summed: Arrays) -> float:
        """The squared distances of the worker's images to their centres."""
        return float(_square_distances(part, pulled["centres"]).min(axis=1).sum())


def _square_distances(images: NDArray[np.float64], centres: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(((images[:, None] - centres) ** 2).sum(axis=2))


def workload(data: Path | None) -> KMeans:
    """The model; `data` is the folder given with `--data`, which this one does not need."""
    return KMeans(load_digits().data, clusters=10)
