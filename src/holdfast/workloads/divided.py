"""What a parameter server asks of a workload: its iteration, divided among workers and nodes.

An iteration is a fixed number of rounds. In a round every worker pulls blocks, computes from them and from its part of
the input, and pushes something for blocks; once all have pushed, the nodes apply it to the blocks that they hold.

Blocks travel packed, as `Blocks.pack` packs them: for every array the rows of some blocks, in rising order of their
numbers, without gaps in memory. An array none of whose blocks is among them is not there.

Nodes may also say something about all blocks that they hold together, such as how often each word has each topic; what
they say adds up, and workers get the sum. It is added up in any order, so it should be whole numbers where the last bits
matter.

What a worker is given may be shared with others: it reads `pulled` and `summed`, and never changes them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.blocks.division import Ids
from holdfast.workloads.workload import Arrays, Workload


class When(NamedTuple):
    """A round of an iteration, and the stream of random numbers that the run follows."""

    iteration: int
    round: int
    stream: int


class Push(NamedTuple):
    """What a worker has computed for some blocks, which it names in rising order.

    For each array that it changes, one row for every row of these blocks; how wide a row is and what it means is between
    `compute` and `apply`. Arrays that only nodes change, such as an optimizer's moments, are left out.
    """

    ids: Ids
    values: Arrays


class Divided(Workload, Protocol):
    """A workload that a parameter server can run; the simulator's iteration is the same mathematics."""

    @property
    def rounds(self) -> int:
        """How often in an iteration workers pull and push: once for every batch, or for every half of the model."""

    def part(self, worker: int, workers: int) -> Any:
        """What this worker needs of the input, as one of so many; made where the worker runs, and never sent."""

    def pulls(self, part: Any, round: int) -> Ids:
        """The blocks that a worker needs in this round, in rising order; of round `rounds`, to measure the loss."""

    def summary(self, ids: Ids, held: Arrays) -> Arrays:
        """What a node says about all blocks that it holds; added up over the nodes. Nothing for most workloads."""

    def compute(self, part: Any, when: When, pulled: Arrays, summed: Arrays) -> Push:
        """What this worker pushes: what workers push for a block is added up, in the order of the workers."""

    def apply(self, when: When, ids: Ids, held: Arrays, pushed: Arrays) -> None:
        """Change blocks in place by the sum of what was pushed for them; both are packed alike.

        Only blocks for which some worker has pushed are among them, and any of those may be: what happens to a block must
        not depend on which others are there.
        """

    def measure(self, part: Any, pulled: Arrays, summed: Arrays) -> float:
        """What this worker's part of the input adds to the loss."""

    def total(self, measures: Sequence[float]) -> float:
        """The loss, from what each worker has measured, in the order of the workers."""


def share(length: int, worker: int, workers: int) -> slice:
    """This worker's neighbouring places of so many: all workers have equally many to within one."""
    return slice(length * worker // workers, length * (worker + 1) // workers)


def balanced_share(weights: npt.NDArray[Any], worker: int, workers: int) -> slice:
    """This worker's neighbouring places, where places weigh differently: all workers carry about the same."""
    ends = np.cumsum(weights)
    targets = np.arange(1, workers) * (ends[-1] / workers if len(ends) else 0)
    cuts = np.searchsorted(ends - weights / 2, targets)  # a place goes where its middle is
    first, last = np.concatenate(([0], cuts, [len(weights)]))[[worker, worker + 1]]
    return slice(int(first), int(last))


def writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array in one run of memory, copied if it is read-only, as what came over a network is.

    Functions are compiled anew for arrays that they may not write, which takes seconds.
    """
    return np.require(array, requirements=["C", "W"])
