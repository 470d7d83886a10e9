"""Orders of samples that the script gives with `run.batches(dataset, sampler=...)`: a torch sampler or a function.

The order of an epoch is drawn on every rank, with all random generators seeded from the run's seed and the epoch. So
all ranks, and all attempts, draw the same order without exchanging it.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from holdfast.blocks.division import Ids
from holdfast.errors import BadInput
from holdfast.sampler import orders
from holdfast.train.state import rng

Sampler: TypeAlias = Iterable[int] | Callable[[int, int], Iterable[int]]
SAMPLER = "sampler"
KEPT = 2  # epochs whose order is kept: batches are requested ahead of the step that is trained


class DrawnOrders:
    """The order of the samples in each epoch, which the script's `sampler` determines when the epoch begins.

    An iterable `sampler` is iterated over once per epoch, after a call of its method `set_epoch`, if it has that. A
    function is called with the epoch and the seed. `size` is the number of samples in the dataset."""

    def __init__(self, sampler: Sampler, size: int, seed: int) -> None:
        self._sampler, self._size, self._seed = _checked(sampler), size, seed
        first = self._draw(0)
        self.samples = len(first)
        """The number of samples in an epoch."""
        self.digest = orders.digest(first)
        self._kept = {0: first}
        if orders.digest(self._draw(0)) != self.digest:
            raise BadInput(
                f"{self._name} returned two different orders for the same epoch, so a run could not resume: draw from "
                "torch's, numpy's or Python's global generators, which are seeded for every epoch, or give a function of "
                "the epoch and the seed."
            )

    def of(self, epoch: int) -> Ids:
        """Return the ids of all samples of `epoch`, in the order in which they are trained."""
        if epoch not in self._kept:
            order = self._draw(epoch)
            if len(order) != self.samples:
                raise BadInput(
                    f"{self._name} returned {len(order)} indices for epoch {epoch} and {self.samples} for epoch 0: return "
                    "the same number in every epoch, for example by drawing some samples twice."
                )
            self._kept = dict([*self._kept.items(), (epoch, order)][-KEPT:])
        return self._kept[epoch]

    @property
    def _name(self) -> str:
        return f"the sampler ({getattr(self._sampler, '__name__', type(self._sampler).__name__)})"

    def _draw(self, epoch: int) -> Ids:
        """Ask the sampler for the order of `epoch`, and leave the random generators of this process unchanged."""
        key = rng.key(self._seed, SAMPLER, epoch)
        with rng.seeded_with(key):
            return self._as_ids(epoch, list(self._returned(epoch, key)))

    def _returned(self, epoch: int, key: int) -> Iterable[Any]:
        sampler: Any = self._sampler
        if not hasattr(sampler, "__iter__"):
            return sampler(epoch, self._seed)  # type: ignore[no-any-return]
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            generator.manual_seed(key)
        return sampler  # type: ignore[no-any-return]

    def _as_ids(self, epoch: int, indices: list[Any]) -> Ids:
        try:
            order = np.array([operator.index(index) for index in indices], np.int64)
        except (TypeError, OverflowError) as error:
            wrong = next((index for index in indices if not hasattr(index, "__index__")), indices[0])
            raise BadInput(
                f"{self._name} returned {wrong!r:.60} for epoch {epoch}, which is not the index of a sample: return single "
                "indices, of which every global_batch make up a step."
            ) from error
        if len(order) and not 0 <= order.min() <= order.max() < self._size:
            raise BadInput(
                f"{self._name} returned indices from {order.min()} to {order.max()} for epoch {epoch}, and the dataset "
                f"has samples 0 to {self._size - 1}."
            )
        return order


def _checked(sampler: Sampler) -> Sampler:
    """Return `sampler`; raise BadInput, with advice, if it is of a kind that a run cannot use."""
    if isinstance(sampler, BatchSampler) or getattr(sampler, "batch_size", None) is not None:
        raise BadInput(
            f"a {type(sampler).__name__} returns batches, and the run makes the batches: give a sampler of single indices, of "
            "which every global_batch make up a step. For length buckets, return similar samples one after another."
        )
    if isinstance(sampler, DistributedSampler):
        raise BadInput(
            "a DistributedSampler divides the samples among the ranks, and so does the run: leave it out, or give a sampler "
            "that returns the indices of all ranks."
        )
    if not (hasattr(sampler, "__iter__") or callable(sampler)):
        raise BadInput(
            f"a {type(sampler).__name__} is neither a sampler nor a function: give an iterable of indices, such as torch's "
            "WeightedRandomSampler, or a function of the epoch and the seed that returns one."
        )
    return sampler
