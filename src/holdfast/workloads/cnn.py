"""A small convolutional network trained by Adam on images of digits; an iteration is a fixed number of batches.

The loss is computed on fixed images, with the mean of the parameters over the iteration's batches: the loss of the
parameters themselves varies by 10 % between batches, more than a failure costs. Every row of a parameter counts its own
steps for Adam's bias correction, because a restored row gets its count back with its moments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from math import prod
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from holdfast.blocks.division import Blocks, Floats, Ids, Norm, along, euclidean, whole
from holdfast.workloads.convnet import Architecture
from holdfast.workloads.datasets import LabeledData, load
from holdfast.workloads.divided import DividedDefaults, Push, RoundId, share, writable
from holdfast.workloads.workload import Arrays, Clock, Stack, advance_each, loss_of_each

if TYPE_CHECKING:
    from holdfast.workloads.convnet import Network

RATE, MEAN, SQUARE, EPSILON = 1e-3, 0.9, 0.999, 1e-8


@njit(cache=True, error_model="numpy")  # numpy's division does not test for zero, so the loop can be vectorised
def update(parameters: Any, mean: Any, square: Any, total: Any, gradient: Any, bounds: Any, counts: Any) -> None:
    """Do an Adam step in place; `mean` and `square` are the moments. Add the new parameters to `total`.

    Row i has the elements `bounds[i]:bounds[i+1]` of these flat arrays and has had `counts[i]` steps before."""
    fresh, fresh_square = np.float32(1 - MEAN), np.float32(1 - SQUARE)
    kept, epsilon = np.float32(SQUARE), np.float32(EPSILON)
    for row in range(len(counts)):
        counts[row] += 1
        rate = np.float32(RATE / (1 - MEAN ** counts[row]))
        root = np.float32((1 - SQUARE ** counts[row]) ** -0.5)
        for i in range(bounds[row], bounds[row + 1]):
            slope = gradient[i]
            mean[i] += fresh * (slope - mean[i])
            square[i] = kept * square[i] + fresh_square * slope * slope
            parameters[i] -= rate * mean[i] / (np.sqrt(square[i]) * root + epsilon)
            total[i] += parameters[i]


MOMENTS = ("mean", "square")
COMPANIONS = (*MOMENTS, "count", "average")  # of every parameter: Adam's, and the mean over the last iteration


@dataclass(frozen=True, eq=False)
class ConvolutionalNetwork(DividedDefaults):
    """A small convolutional network trained by Adam.

    `partition` says what a block is: a whole weight or bias ("layer"), or one row of a weight or one element of a bias ("shard")."""

    data: LabeledData
    architecture: Architecture
    partition: str
    batches: int
    evaluated: int
    criterion: float
    batch: int = 64
    lanes: int = 1
    stochastic: bool = True
    steady: bool = False
    norm: Norm = field(default=euclidean, repr=False)

    @property
    def name(self) -> str:
        return f"cnn-{self.data.name}"

    @cached_property
    def blocks(self) -> Blocks:
        state = self.start()
        companions = {name: [f"{name}.{companion}" for companion in COMPANIONS] for name in self.architecture.shapes}
        if self.partition == "layer":
            return whole(state, companions=companions)
        return reduce(add, (along(state, name, companions=names) for name, names in companions.items()))

    def start(self, stream: int = 0) -> Arrays:
        rng = np.random.default_rng((stream, 0))  # 0: before iteration 0, which draws by 1
        state: Arrays = {}
        for name, shape in self.architecture.shapes.items():
            bound = (6 / prod(shape[1:])) ** 0.5 if name.endswith("weight") else 0.0
            state[name] = rng.uniform(-bound, bound, shape).astype(np.float32)
            state |= {f"{name}.{moment}": np.zeros(shape, np.float32) for moment in MOMENTS}
            state |= {f"{name}.count": np.zeros(shape[0], np.int64), f"{name}.average": state[name].copy()}
        return state

    def samples(self, iteration: int, stream: int) -> Ids:
        """Draw the images of an iteration with the random seed `stream`.

        Return their indices, with a row for each batch."""
        rng = np.random.default_rng((stream, iteration + 1))
        chosen = rng.choice(len(self.data.y), self.batches * self.batch, replace=False)
        return chosen.reshape(self.batches, self.batch)

    def advance(self, stack: Stack, clock: Clock) -> Stack:
        from holdfast.workloads.convnet import Network, one_thread  # here, because importing PyTorch takes a second

        with one_thread():
            network = Network(self.architecture, self.batch)
            return advance_each(partial(self._train, network), stack, clock)

    def loss(self, stack: Stack) -> Floats:
        from holdfast.workloads.convnet import Network, one_thread

        with one_thread():
            network = Network(self.architecture, self.batch)
            return loss_of_each(lambda state: self._evaluate(network, state, self._evaluated), stack)

    def survivors(self, ids: Ids, held: Arrays) -> Arrays:
        return {}

    def fresh(self, ids: Ids, summary: Arrays, iteration: int, stream: int) -> Arrays:
        return {name: np.asarray(value) for name, value in self.blocks.pack(self.start(stream), ids).items()}

    @property
    def rounds(self) -> int:
        return self.batches

    def part(self, worker: int, workers: int) -> "_Part":
        evaluated = self._evaluated[share(len(self._evaluated), worker, workers)]
        return _Part(self, share(self.batch, worker, workers), evaluated)

    def pulls(self, part: "_Part", round: int) -> Ids:
        return self._everything

    def compute(self, part: "_Part", when: RoundId, pulled: Arrays, summed: Arrays) -> Push:
        which = part.images(when)
        if not len(which):
            return Push(np.zeros(0, np.int64), {})
        with part.network(len(which)) as network:
            network.parameters.fill(pulled)
            network.load(self.data.x, which)
            network.differentiate(self.data.y[which])
            network.gradient.flat *= np.float32(len(which) / self.batch)
            return Push(self._everything, network.gradient.copy())

    def apply(self, when: RoundId, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        for name, gradient in pushed.items():
            count, average = held[f"{name}.count"], held[f"{name}.average"]
            mean, square = (held[f"{name}.{moment}"].reshape(-1) for moment in MOMENTS)
            bounds = np.arange(len(count) + 1) * gradient[0].size
            average *= np.float32(when.round)
            slopes = writable(gradient).reshape(-1)
            update(held[name].reshape(-1), mean, square, average.reshape(-1), slopes, bounds, count)
            average /= np.float32(when.round + 1)

    def measure(self, part: "_Part", pulled: Arrays, summed: Arrays) -> float:
        with part.network(self.batch) as network:
            return self._evaluate(network, pulled, part.evaluated)

    def _train(self, network: "Network", state: Arrays, iteration: int, stream: int) -> Arrays:
        from holdfast.workloads.convnet import Buffer

        shapes = self.architecture.shapes
        mean, square, average = (Buffer(shapes) for _ in range(3))
        kept = {"": network.parameters, ".mean": mean, ".square": square}
        for suffix, buffer in kept.items():
            buffer.fill({name: state[name + suffix] for name in shapes})
        counts = np.concatenate([state[f"{name}.count"] for name in shapes])
        for which in self.samples(iteration, stream):
            network.load(self.data.x, which)
            network.differentiate(self.data.y[which])
            parameters, gradient = network.parameters.flat, network.gradient.flat
            update(parameters, mean.flat, square.flat, average.flat, gradient, self._row_bounds, counts)
        average.flat /= self.batches
        rows = np.cumsum([0, *(shape[0] for shape in shapes.values())])
        return {
            name + suffix: values
            for suffix, buffer in (kept | {".average": average}).items()
            for name, values in buffer.copy().items()
        } | {f"{name}.count": counts[rows[i] : rows[i + 1]] for i, name in enumerate(shapes)}

    def _evaluate(self, network: "Network", state: Arrays, batches: Ids) -> float:
        network.parameters.fill({name: state[f"{name}.average"] for name in self.architecture.shapes})
        total = 0.0
        for which in batches:
            network.load(self.data.x, which)
            scores, labels = network.scores().numpy(), self.data.y[which]
            highest, truth = scores.max(axis=0), scores[labels, np.arange(len(labels))]
            losses = np.log(np.exp(scores - highest).sum(axis=0)) + highest - truth
            total += float(losses.sum(dtype=np.float64))
        return total / self.evaluated

    @cached_property
    def _everything(self) -> Ids:
        return np.arange(len(self.blocks))

    @property
    def _evaluated(self) -> Ids:
        return np.arange(self.evaluated).reshape(-1, self.batch)

    @cached_property
    def _row_bounds(self) -> Ids:
        sizes = [np.full(shape[0], prod(shape[1:])) for shape in self.architecture.shapes.values()]
        return np.append(0, np.cumsum(np.concatenate(sizes)))


class _Part:
    """A worker's part of the training data: its slice of every batch, and the images on which it measures the loss."""

    def __init__(self, workload: ConvolutionalNetwork, places: slice, evaluated: Ids) -> None:
        self.evaluated = evaluated
        self._workload, self._places = workload, places
        self._networks: dict[int, Network] = {}
        self._drawn: tuple[tuple[int, int], Ids] | None = None

    def images(self, when: RoundId) -> Ids:
        key = when.iteration, when.stream
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = key, self._workload.samples(*key)
        return self._drawn[1][when.round, self._places]

    @contextmanager
    def network(self, batch: int) -> Iterator["Network"]:
        """Yield a cached network for batches of size `batch`, with PyTorch limited to one thread."""
        from holdfast.workloads.convnet import Network, one_thread

        with one_thread():
            if batch not in self._networks:
                self._networks[batch] = Network(self._workload.architecture, batch)
            yield self._networks[batch]


# The network, batches of an iteration, images evaluated and criterion of each data set.
SETTINGS: dict[str, tuple[Architecture, int, int, float]] = {
    "mnist": (Architecture(28, 10, kernel=5, stride=2, channels=(8, 24), hidden=(128, 64)), 48, 4096, 0.08),
    "digits": (Architecture(8, 10, kernel=3, stride=1, channels=(8, 16), hidden=(64, 32)), 12, 512, 0.2),
}


def cnn(dataset: str, data: Path | None = None, partition: str = "shard") -> ConvolutionalNetwork:
    """Return the workload for `dataset`, whose files are in the folder `data` if given.

    `partition` says what a block is: a whole weight or bias ("layer"), or one row of a weight or one element of a bias ("shard")."""
    architecture, batches, evaluated, criterion = SETTINGS[dataset]
    return ConvolutionalNetwork(load(dataset, data), architecture, partition, batches, evaluated, criterion)
