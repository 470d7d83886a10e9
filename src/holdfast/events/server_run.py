"""Events of a run on the parameter server, written by its controller, nodes and workers.

Nodes hold the blocks of the model, and workers hold the parts of the input. In each round of an iteration, workers push
updates to the nodes. `version` is that of the map which assigns blocks to nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """A controller began, or continued, to train until the loss is below `criterion`, or for `iterations` at most."""

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
    """An iteration ended: its loss, and the seconds that the slowest worker or node took for each part of it."""

    iteration: int
    loss: float | None
    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    checkpoint: float


class Pushed(NamedTuple):
    """A worker pushed the update of one input part to `nodes`, in a round of an iteration."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """A node applied the updates from the input `parts` to its blocks, each once.

    `again` counts repeated pushes of this round, which were not applied.
    """

    iteration: int
    round: int
    version: int
    blocks: Samples
    parts: Sequence[int]
    again: int = 0


class Chosen(NamedTuple):
    """Blocks were chosen to be saved after an iteration; a node records its own, the controller all of them."""

    iteration: int
    blocks: Samples
    bytes: int
    seconds: float


class Struck(NamedTuple):
    """Fault injection is about to kill `targets`: the numbers of nodes or workers, as `kind` tells."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """A node, worker or controller (`kind`) was lost during `round`; `blocks` are those that a lost node held."""

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()
    version: int = 0


class Restored(NamedTuple):
    """Blocks were restored to a node from the checkpoint, each as saved at the iteration in `saved_at`.

    `size` is the distance between the lost and the restored values, if it is known.
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
    """Updates from the input `parts` were lost with `blocks` before they were applied, and are not repeated."""

    iteration: int
    round: int
    parts: Sequence[int]
    blocks: Samples


class Joined(NamedTuple):
    """A node or worker joined the run, which uses version `version` of the block map from now on."""

    iteration: int
    kind: str
    number: int
    version: int


class Moved(NamedTuple):
    """Blocks were moved from one node to another, unchanged."""

    iteration: int
    source: int
    target: int
    version: int
    blocks: Sequence[int]


_OfNode: TypeAlias = Pushed | Applied | Chosen | Restored | Dropped | Moved
ServerEvent: TypeAlias = Serve | Iterate | _OfNode | Struck | Lost | Joined
