"""Events of a run on the parameter server, written by its controller, nodes and workers.

Nodes hold the blocks of the model, and workers hold the parts of the input. In each round of an iteration, workers push
updates to the nodes. `version` is that of the map which assigns blocks to nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """Event: a controller began or continued to train, until the loss is below `criterion`, at most for `iterations`.

    The model has `blocks` parts, and an iteration has `rounds` updates. `policy` chooses which blocks to save, a
    `fraction` of them in each save. The saves of `interval` iterations add up to the size of the model."""

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
    """Event: an iteration ended, with its loss and, for each phase such as `pull`, the slowest process's seconds."""

    iteration: int
    loss: float | None
    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    checkpoint: float


class Pushed(NamedTuple):
    """Event: a worker sent `nodes` the update that it computed from `part` of the input, in `round` of an iteration."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """Event: a node applied the updates that were computed from the input `parts` to its blocks (parts of the model).

    Each update was applied once; `again` counts repeated updates in this round, which were ignored."""

    iteration: int
    round: int
    version: int
    blocks: Samples
    parts: Sequence[int]
    again: int = 0


class Chosen(NamedTuple):
    """Event: blocks of the model were chosen for a save after `iteration`.

    A node records its own blocks, and the controller those of all nodes. `bytes` is their size, and `seconds` the time
    that the choice took."""

    iteration: int
    blocks: Samples
    bytes: int
    seconds: float


class Struck(NamedTuple):
    """Event: an injected failure is about to kill the processes of `kind` (such as node) numbered `targets`."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """Event: a process of the run was lost in `round`; `kind` and `number` identify it, such as "node" and 2.

    `blocks` are the parts of the model that it held. `version` is the number of the next round, counted over the run.
    """

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()
    version: int = 0


class Restored(NamedTuple):
    """Event: blocks (parts of the model) were restored to a node, as saved at the iterations in `saved_at`.

    `size` is the distance between the lost and the restored values, if it is known."""

    iteration: int
    round: int
    node: int
    version: int
    blocks: Sequence[int]
    saved_at: Sequence[int]
    seconds: float
    size: float | None = None


class Dropped(NamedTuple):
    """Event: updates from the input `parts` for `blocks` were lost before they were applied, and are not repeated."""

    iteration: int
    round: int
    parts: Sequence[int]
    blocks: Samples


class Joined(NamedTuple):
    """Event: a node or worker joined the run, which now uses `version` of the map from blocks to nodes."""

    iteration: int
    kind: str
    number: int
    version: int


class Moved(NamedTuple):
    """Event: blocks of the model moved from node `source` to node `target` without a change of their values.

    `version` is the version of the partition map after the move."""

    iteration: int
    source: int
    target: int
    version: int
    blocks: Sequence[int]


_OfNode: TypeAlias = Pushed | Applied | Chosen | Restored | Dropped | Moved
ServerEvent: TypeAlias = Serve | Iterate | _OfNode | Struck | Lost | Joined
