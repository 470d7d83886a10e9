"""Events of a run on the parameter server, written by its controller, nodes and workers.

Nodes hold the blocks of the model, and workers hold the parts of the input. In each round of an iteration, workers push
updates to the nodes. In all events, `version` is the version of the map from blocks to nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """Event: a parameter server starts or resumes training, for `iterations` or until the loss is below `criterion`."""

    attempt: int
    workload: str
    blocks: int  # parts of the model
    nodes: int
    workers: int
    rounds: int  # updates in each iteration
    policy: str  # the choice of the blocks of each save
    fraction: str  # of the model, in each save
    interval: int  # iterations in which saves add up to the size of the model
    recovery: str
    seed: int
    staleness: int
    criterion: float  # the loss below which training ends
    iterations: int
    saves: str = "regular"


class Iterate(NamedTuple):
    """Event: an iteration ended, with its loss and the seconds of the slowest process in each phase, such as `pull`."""

    iteration: int
    loss: float | None
    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    checkpoint: float


class Pushed(NamedTuple):
    """Event: a worker sent an update to `nodes`, computed from one `part` of the input in `round` of an iteration."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """Event: a node updated its blocks (parts of the model) with the updates computed from the input `parts`."""

    iteration: int
    round: int
    version: int
    blocks: Samples
    parts: Sequence[int]
    again: int = 0  # repeated updates that were ignored


class Chosen(NamedTuple):
    """Event: blocks were chosen for a save. Each node records its own blocks; the controller records all of them."""

    iteration: int
    blocks: Samples
    bytes: int  # of these blocks
    seconds: float  # that the choice took


class Struck(NamedTuple):
    """Event: an injected failure is about to kill the processes of `kind` (such as "node") numbered `targets`."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """Event: process `number` of `kind` (such as "node") was lost, in update `round` of `iteration`."""

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()  # the parts of the model that it held
    version: int = 0  # the number of the next round, counted through the run


class Restored(NamedTuple):
    """Event: blocks (parts of the model) were restored to a node, with their values at the iterations `saved_at`."""

    iteration: int
    round: int
    node: int
    version: int
    blocks: Sequence[int]
    saved_at: Sequence[int]
    seconds: float
    size: float | None = None  # the distance between the lost and the restored values, if known


class Dropped(NamedTuple):
    """Event: updates of `blocks`, computed from the input `parts`, were lost before they were applied."""

    iteration: int
    round: int
    parts: Sequence[int]
    blocks: Samples


class Joined(NamedTuple):
    """Event: a node or worker joined the run; `version` is the new version of the map from blocks to nodes."""

    iteration: int
    kind: str
    number: int
    version: int


class Moved(NamedTuple):
    """Event: blocks of the model moved from node `source` to node `target`, with unchanged values."""

    iteration: int
    source: int
    target: int
    version: int  # the new version of the map from blocks to nodes
    blocks: Sequence[int]


_OfNode: TypeAlias = Pushed | Applied | Chosen | Restored | Dropped | Moved
ServerEvent: TypeAlias = Serve | Iterate | _OfNode | Struck | Lost | Joined
