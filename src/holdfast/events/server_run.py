"""Events of a run on the parameter server, written by its controller, nodes and workers.

Nodes hold the blocks of the model, and workers hold the parts of the input. In each round of an iteration, workers push
updates to the nodes. `version` is that of the map which assigns blocks to nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """Event: a parameter server began or continued to train, until the loss is below `criterion` or after `iterations`.

    The model has `blocks` parts, and an iteration has `rounds` updates. `policy` chooses the blocks of each save, a
    `fraction` of the model. After `interval` iterations, as many values are saved as the model has."""

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
    """Event: a worker sent an update, computed from one `part` of the input, to `nodes` in `round` of an iteration."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """Event: a node updated its blocks (parts of the model) with the updates computed from the input `parts`.

    Each update was applied once; `again` counts the repeated updates that were ignored."""

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
    """Event: an injected failure is about to kill processes: those of `kind` (such as "node") numbered `targets`."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """Event: a process was lost in `round`; `kind` and `number` identify it, such as "node" and 2.

    `blocks` are the parts of the model that the process held. `round` counts within an iteration; `version` counts the rounds of the whole run, and is that of the next one."""

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()
    version: int = 0


class Restored(NamedTuple):
    """Event: blocks (parts of the model) were restored to a node, with their values at the iterations `saved_at`.

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
    """Event: blocks of the model moved from node `source` to node `target`, with unchanged values.

    `version` is the new version of the map from blocks to nodes."""

    iteration: int
    source: int
    target: int
    version: int
    blocks: Sequence[int]


_OfNode: TypeAlias = Pushed | Applied | Chosen | Restored | Dropped | Moved
ServerEvent: TypeAlias = Serve | Iterate | _OfNode | Struck | Lost | Joined
