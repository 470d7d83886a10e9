"""The interface of a workload that runs on the parameter server: its iteration, divided among workers and nodes.

An iteration has a fixed number of rounds. In a round every worker pulls blocks, computes from them and from its part of
the input, and pushes updates; once all have pushed, the nodes apply the updates to their blocks.

Blocks are packed as by `Blocks.pack`: for every array the rows of some blocks, in rising order of their numbers,
contiguous in memory. An array without any of these blocks is left out.

Nodes may also give a summary of all their blocks, such as how often each word has each topic. Summaries are added up,
in any order, and workers get the sum; use whole numbers if the last bits matter.

Workers share `pulled` and `summed` with others and must not change them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.workloads.workload import Arrays, Workload


class When(NamedTuple):
    """A round of an iteration, and the stream of random numbers of the run."""

    iteration: int
    round: int
    stream: int


class Push(NamedTuple):
    """A worker's update of the blocks `ids`, which rise: for each array that workers change, rows of any meaning."""

    ids: Ids
    values: Arrays


class Divided(Workload, Protocol):
    """A workload that the parameter server can run; it computes the same as the simulator's iteration."""

    @property
    def rounds(self) -> int:
        """The number of rounds per iteration: one per batch, or one per half of the model."""

    def part(self, worker: int, workers: int) -> Any:
        """Return the input of worker number `worker` of `workers`; it is made where the worker runs, and never sent."""

    def pulls(self, part: Any, round: int) -> Ids:
        """Return the blocks that a worker needs in `round`, in rising order; in round `rounds`, to measure the loss."""

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        """Return a node's summary of all its blocks, which is added up over nodes; empty for most workloads."""

    def compute(self, part: Any, when: When, pulled: Arrays, summed: Arrays) -> Push:
        """Return a worker's push; pushes for the same block are added up, in the order of the workers."""

    def apply(self, when: When, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        """Change blocks, each by itself, in place by the sum of what was pushed for them; both are packed alike."""

    def measure(self, part: Any, pulled: Arrays, summed: Arrays) -> float:
        """Return the loss of this worker's part of the input."""

    def total(self, measures: Sequence[float]) -> float:
        """Return the loss, from the workers' measures in the order of the workers."""


class DividedDefaults:
    """Defaults of most divided workloads: nodes give no summary, and the loss is the sum of the workers' measures."""

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        """Return no summary: workers need only the blocks that they pull."""
        return {}

    def total(self, measures: Sequence[float]) -> float:
        return sum(measures)


def share(length: int, worker: int, workers: int) -> slice:
    """Return this worker's slice of `length` items; all workers get equally many to within one."""
    return slice(length * worker // workers, length * (worker + 1) // workers)


def balanced_share(weights: npt.NDArray[Any], worker: int, workers: int) -> slice:
    """Return this worker's slice of items of different weights; all workers get about the same weight."""
    ends = np.cumsum(weights)
    targets = np.arange(1, workers) * (ends[-1] / workers if len(ends) else 0)
    cuts = np.searchsorted(ends - weights / 2, targets)  # a place goes where its middle is
    first, last = np.concatenate(([0], cuts, [len(weights)]))[[worker, worker + 1]]
    return slice(int(first), int(last))


def writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous writable array: for read-only ones, as received over a network, code is compiled again."""
    return np.require(array, requirements=["C", "W"])
