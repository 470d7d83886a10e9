"""Events of a run on the parameter server, written by its controller, nodes and workers."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast.sampler.digest import Samples


class Serve(NamedTuple):
    """A controller began, or continued, to train a workload until the loss is below `criterion`, or for `iterations`."""

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
    """An iteration ended: its loss, and the seconds of the slowest worker or node in each part of it."""

    iteration: int
    loss: float | None
    seconds: float
    pull: float
    compute: float
    push: float
    apply: float
    checkpoint: float


class Pushed(NamedTuple):
    """A worker pushed what it computed in a round from one part of the input to `nodes`, by map `version`."""

    iteration: int
    round: int
    part: int
    version: int
    blocks: Samples
    nodes: Sequence[int]


class Applied(NamedTuple):
    """A node applied a round to its blocks: the pushes from `parts` of the input, once each.

    `again` counts repeated pushes of this round, which were not applied.
    """

    iteration: int
    round: int
    version: int
    blocks: Samples
    parts: Sequence[int]
    again: int = 0


class Chosen(NamedTuple):
    """Blocks were chosen to be saved after an iteration: a node writes its own, the controller all of them."""

    iteration: int
    blocks: Samples
    bytes: int
    seconds: float


class Struck(NamedTuple):
    """Members are about to be killed by fault injection, at the beginning of an iteration or at another point."""

    iteration: int
    kind: str
    targets: Sequence[int]
    point: str = "boundary"


class Lost(NamedTuple):
    """A node, worker or controller was lost; `blocks` are those of a node, and `round` the one they waited for."""

    iteration: int
    round: int
    kind: str
    number: int
    why: str
    blocks: Sequence[int] = ()
    version: int = 0


class Restored(NamedTuple):
    """Blocks were restored to a node from the running checkpoint, each from the iteration in `saved_at`, by a new map.

    `size` is how far they had moved since then, if it is known.
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
    """Pushes of a round for blocks that were lost before they were applied; they are not repeated."""

    iteration: int
    round: int
    parts: Sequence[int]
    blocks: Samples


class Joined(NamedTuple):
    """A node or worker joined the run, which uses map `version` from now on."""

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
