"""Events of a run on the parameter server, written by its controller, nodes and workers.

Nodes hold the blocks of the model, and workers hold the parts of the input. In each round of an iteration, workers push
updates to the nodes. In all events, `version` is the version of the map from blocks to nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """Event: a parameter server starts or resumes training, with these settings."""

    attempt: int
    workload: str  # the name of the workload
    blocks: int  # the number of blocks of the model
    nodes: int  # the number of nodes, which hold the blocks
    workers: int  # the number of workers, which hold the input
    rounds: int  # the number of rounds in each iteration
    policy: str  # the rule that chooses the blocks of each save
    fraction: str  # the part of the model in each save
    interval: int  # iterations in which saves add up to the size of the model
    recovery: str  # the blocks that return to saved values after a loss: `partial`, `full` or `fresh`
    seed: int  # the seed of all random numbers
    staleness: int  # how many iterations a worker may be ahead of the others
    criterion: float  # the loss below which training ends
    iterations: int  # the maximum number of iterations
    saves: str = "regular"  # the first saves: `regular`, `early` or `early-full`


class Iterate(NamedTuple):
    """Event: an iteration ended. `pull`, `compute`, `push`, `apply` and `checkpoint` are parts of the iteration.

    The time of each part is that of the process that took longest."""

    iteration: int  # the number of the iteration
    loss: float | None  # the loss after the iteration
    seconds: float  # the time of the whole iteration
    pull: float  # the time in which workers fetched blocks from the nodes
    compute: float  # the time in which workers computed updates
    push: float  # the time in which workers sent updates
    apply: float  # the time in which nodes applied updates
    checkpoint: float  # the time for the choice and the save of blocks


class Pushed(NamedTuple):
    """Event: a worker sent an update to `nodes`, computed from one `part` of the input in `round` of an iteration."""

    iteration: int
    round: int
    part: int  # the number of the part of the input
    version: int
    blocks: Samples  # how many blocks the update changes, and a digest of their numbers
    nodes: Sequence[int]  # the nodes that the update was sent to


class Applied(NamedTuple):
    """Event: a node updated its blocks (parts of the model) with the updates from the parts `parts` of the input."""

    iteration: int
    round: int
    version: int
    blocks: Samples  # how many blocks were updated, and a digest of their numbers
    parts: Sequence[int]  # the parts of the input
    again: int = 0  # the number of repeated updates that were ignored


class Chosen(NamedTuple):
    """Event: blocks were chosen for a save. Each node records its own blocks; the controller records all of them."""

    iteration: int
    blocks: Samples  # how many blocks were chosen, and a digest of their numbers
    bytes: int  # the size of these blocks
    seconds: float  # the time that the choice took


class Struck(NamedTuple):
    """Event: an injected failure is about to kill the processes of `kind` (such as "node") with the numbers `targets`."""

    iteration: int
    kind: str  # `node`, `worker` or `controller`
    targets: Sequence[int]  # the numbers of the processes
    point: str = "boundary"  # the point within the iteration, such as `apply`


class Lost(NamedTuple):
    """Event: a process of `kind`, such as "node", was lost in round `round` of `iteration`."""

    iteration: int
    round: int
    kind: str  # `node`, `worker` or `controller`
    number: int  # the number of the process
    why: str  # the reason for regarding it as lost
    blocks: Sequence[int] = ()  # the blocks of the model that the process held
    version: int = 0  # if `blocks` were lost: how many rounds of the run were complete


class Restored(NamedTuple):
    """Event: blocks (parts of the model) were restored to a node, each with its newest saved values."""

    iteration: int
    round: int
    node: int  # the node that holds the blocks now
    version: int
    blocks: Sequence[int]  # the numbers of the blocks
    saved_at: Sequence[int]  # for each block the iteration of its save
    seconds: float  # the time that the restore took
    size: float | None = None  # the distance between the lost and the restored values, if known


class Dropped(NamedTuple):
    """Event: updates of `blocks`, computed from the parts `parts` of the input, were lost before a node applied them."""

    iteration: int
    round: int
    parts: Sequence[int]  # the parts of the input
    blocks: Samples  # how many blocks lack the updates, and a digest of their numbers


class Joined(NamedTuple):
    """Event: a node or worker joined the run; `version` is the new version of the map from blocks to nodes."""

    iteration: int
    kind: str  # `node` or `worker`
    number: int  # the number of the process
    version: int  # the new version of the map from blocks to nodes


class Moved(NamedTuple):
    """Event: blocks of the model moved from node `source` to node `target`, with unchanged values."""

    iteration: int
    source: int  # the node that held the blocks
    target: int  # the node that holds the blocks now
    version: int  # the new version of the map from blocks to nodes
    blocks: Sequence[int]  # the numbers of the blocks


_OfNode: TypeAlias = Pushed | Applied | Chosen | Restored | Dropped | Moved
ServerEvent: TypeAlias = Serve | Iterate | _OfNode | Struck | Lost | Joined
