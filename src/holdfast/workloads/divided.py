"""What a parameter server asks of a workload: its iteration, divided among workers and nodes.

An iteration is a fixed number of rounds. In a round every worker pulls blocks, computes from them and from its part of
the input, and pushes something for blocks; once all have pushed, the nodes apply it to the blocks that they hold.

Blocks travel packed, as `Blocks.pack` packs them: for every array the rows of some blocks, in rising order of their
numbers. Nodes that hold some blocks may also say something about all of them together, such as how often each word has
each topic; what they say adds up, and workers get the sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from holdfast.blocks import Ids
from holdfast.workloads.workload import Arrays, Workload


class When(NamedTuple):
    """A round of an iteration, and the stream of random numbers that the run follows."""

    iteration: int
    round: int
    stream: int


class Push(NamedTuple):
    """What a worker has computed for some blocks, which it names in rising order."""

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
        """Change blocks in place by the sum of what was pushed for them; both are packed alike."""

    def measure(self, part: Any, pulled: Arrays, summed: Arrays) -> float:
        """What this worker's part of the input adds to the loss."""

    def total(self, measures: Sequence[float]) -> float:
        """The loss, from what each worker has measured."""
