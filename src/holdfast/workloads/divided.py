"""The interface of a workload that runs on the parameter server: its iteration, divided among workers and nodes.

In each round every worker pulls blocks, computes from them and from its part of the input, and pushes updates; once all
have pushed, the nodes apply the updates to their blocks. Blocks are packed as by `Blocks.pack`.

Nodes may also compute a summary of all their blocks, such as how often each word has each topic. Summaries are added
up, in any order, and workers get the sum. Workers must not change `pulled` and `summed`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.workloads.workload import Arrays, Workload


class RoundId(NamedTuple):
    """A round (one update of the model): its iteration, its index in the iteration, and the run's seed (`stream`)."""

    iteration: int
    round: int
    stream: int


class Push(NamedTuple):
    """A worker's update: `ids` are the updated blocks in ascending order, and the workload defines what `values` mean."""

    ids: Ids
    values: Arrays


class DividedWorkload(Workload, Protocol):
    """A workload for the parameter server: in each round, workers compute updates and server nodes apply them."""

    @property
    def rounds(self) -> int:
        """The number of rounds (updates of the model) in an iteration, such as one for each batch."""

    def part(self, worker: int, workers: int) -> Any:
        """Return the part of the training data for worker `worker` of `workers`.

        This method is called in the worker's process."""

    def pulls(self, part: Any, round: int) -> Ids:
        """Return the sorted ids of the blocks that a worker needs in round `round` for `part`, its part of the data.

        If `round` equals `rounds`, return the blocks needed to measure the loss."""

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        """Return a summary, such as counts, of the blocks `ids` of a server node, whose values are `held`.

        Every worker receives the sum of the summaries of all nodes."""

    def compute(self, part: Any, when: RoundId, pulled: Arrays, summed: Arrays) -> Push:
        """Return a worker's update for the round `when`, computed from `part`, its part of the training data.

        `pulled` has the blocks that the worker pulled, and `summed` the sum of all nodes' summaries."""

    def apply(self, when: RoundId, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        """Update the values `held` of the blocks `ids` in place by `pushed`, the sum of the workers' updates."""

    def measure(self, part: Any, pulled: Arrays, summed: Arrays) -> float:
        """Return a worker's loss on `part` of the data, from the blocks `pulled` and all nodes' summaries `summed`."""

    def total(self, measures: Sequence[float]) -> float:
        """Combine `measures`, the losses of all workers in the order of their numbers, into the total loss."""


class DividedDefaults:
    """Defaults for `DividedWorkload`: no summaries, and the total loss is the sum of the workers' losses."""

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        return {}

    def total(self, measures: Sequence[float]) -> float:
        return sum(measures)


def share(length: int, worker: int, workers: int) -> slice:
    """Return the slice of `length` items for worker `worker` of `workers`; slice lengths differ by at most one."""
    return slice(length * worker // workers, length * (worker + 1) // workers)


def balanced_share(weights: npt.NDArray[Any], worker: int, workers: int) -> slice:
    """Return the slice of items for worker `worker` of `workers`; all slices have about the same total weight.

    `weights` has the weight of each item."""
    ends = np.cumsum(weights)
    targets = np.arange(1, workers) * (ends[-1] / workers if len(ends) else 0)
    cuts = np.searchsorted(ends - weights / 2, targets)  # an item belongs to the worker in whose range its middle lies
    first, last = np.concatenate(([0], cuts, [len(weights)]))[[worker, worker + 1]]
    return slice(int(first), int(last))


def writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `array`, or a copy of it if it is not contiguous and writable.

    Numba would compile its functions again for read-only arrays."""
    return np.require(array, requirements=["C", "W"])
