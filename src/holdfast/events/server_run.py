"""Events of a served run: what the controller, the nodes and the workers of a parameter server tell."""

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """A controller of a parameter server has begun, or begun again, to train a workload.

    It ends once the loss is below `criterion`, or after so many `iterations`.
    """

    attempt: int
    workload: str
    blocks: int
    nodes: int
    workers: int
    rounds: int
    policy: str
    fraction: str
    interval: int
    recovery: str
    seed: int
    staleness: int
    criterion: float
    iterations: int
    saves: str = "regular"


class Iterate(NamedTuple):
    """A served iteration is done: its loss, and the seconds of the slowest worker or node in each part of it."""

    iteration: int
    loss: float | None
    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    checkpoint: float


class Pushed(NamedTuple):
    """A worker has pushed what it computed in a round from a part of the input, by the map of a version, to these nodes."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """A node has applied a round to its blocks: what was pushed from these parts of the input, once each.

    `again` counts the pushes that came for this round and were not applied, because they were repeated.
    """

    iteration: int
    round: int
    version: int
    blocks: Samples
    parts: Sequence[int]
    again: int = 0


class Chosen(NamedTuple):
    """Blocks were chosen to be saved as they are once an iteration is done; a node tells of its own, a controller of all."""

    iteration: int
    blocks: Samples
    bytes: int
    seconds: float


class Struck(NamedTuple):
    """Members of a served run are about to be killed on purpose: at the beginning of an iteration, or at another point."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """A node, worker or controller is lost, and why; of a node the blocks, and the round that they waited for."""

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()
    version: int = 0


class Restored(NamedTuple):
    """Blocks came back from the running checkpoint to a node, each from the save of an iteration, under a new map.

    `size` is how far they had moved since, as far as it is known.
    """

    iteration: int
    round: int
    node: int
    version: int
    blocks: Sequence[int]
    saved_at: Sequence[int]
    seconds: float
    size: float | None = None


class Dropped(NamedTuple):
    """What was pushed in a round for blocks that were lost before, or while, it was applied: it is not made up for."""

    iteration: int
    round: int
    parts: Sequence[int]
    blocks: Samples


class Joined(NamedTuple):
    """A node or worker has joined a served run, which goes by this version of the map from now on."""

    iteration: int
    kind: str
    number: int
    version: int


class Moved(NamedTuple):
    """Blocks went from one node to another, as they were."""

    iteration: int
    source: int
    target: int
    version: int
    blocks: Sequence[int]
