"""Events of a training run, written by its ranks, its supervisors and its fault injection."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from holdfast.events.common import JSON
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

# Beginnings of the reasons that a supervisor gives for its verdict.
SECOND_SIGNAL = "killed by a second signal"
SUPERVISED_ONLY = "supervised only: restarted after failures, not checked"


# Named tuples: a long run has an event for every step of every rank, and tuples are small and quick to make.
class Attempt(NamedTuple):
    """A rank began an attempt, with the seed of the run."""

    attempt: int
    world: int
    rank: int
    pid: int
    seed: int | None = None


class Plan(NamedTuple):
    """The plan of a rank: how many samples, in which order, and how they are saved; `data` is a digest of a few samples.

    With a `limit` the plan ends after that many steps, within its last epoch. A plan that `extends` the run may be longer
    than those before it. `command` is a digest of the script's arguments. If `own`, the script draws its samples itself.
    If `loader`, a loader of the script provides batches, and `samples` counts the batches of all ranks.
    """

    attempt: int
    samples: int
    batch: int
    epochs: int
    seed: int
    save_every: int
    writer: str
    config: str
    data: str | None = None
    limit: int | None = None
    extends: bool = False
    command: str | None = None
    own: bool = False
    loader: bool = False


class Recover(NamedTuple):
    """The state that a rank begins with: the snapshot of step `restored`, or none, and the position of the next step.

    `state` is a digest of the protected state in memory when the first step begins, and `fingerprint` its fingerprint, as
    the step before recorded it. `weights` is a digest of the initial weights, if nothing was restored.
    """

    attempt: int
    restored: int | None
    epoch: int
    cursor: int
    rng: str
    seconds: float
    passed_over: "Sequence[Mapping[str, JSON]]" = ()
    state: str | None = None
    fingerprint: str | None = None
    weights: str | None = None


class Seconds(NamedTuple):
    """The seconds of a step: waiting for its data, training, and waiting for a save before that.

    `compute` is measured on the device if `device` is set, otherwise in the process.
    """

    data: float
    compute: float
    stall: float
    device: bool = False


class Step(NamedTuple):
    """A rank trained its share of a step's samples.

    `state` is a fingerprint of the resulting state: the first half of what all ranks share, the second half of what is the
    rank's own. `reduced` backward passes were all-reduced, `held` were not, and optimizers took `stepped` steps.
    """

    attempt: int
    world: int
    rank: int
    epoch: int
    cursor: int
    step: int
    samples: Samples
    seconds: Seconds
    state: str | None = None
    reduced: int = 0
    held: int = 0
    stepped: int = 0
    loss: float | None = None


class Save(NamedTuple):
    """The cost of a save: how long training waited and for what, and how often a storage operation was retried."""

    attempt: int
    step: int
    writer: str
    bytes: int
    seconds: Stall
    retries: int = 0


class Strike(NamedTuple):
    """An injected failure is about to happen."""

    attempt: int
    step: int
    kind: str
    rank: int
    point: str = "boundary"


class Preempted(NamedTuple):
    """A rank stopped because it was asked to."""

    attempt: int
    step: int


class Stopped(NamedTuple):
    """The script stopped the run before its planned end, by `run.stop()` or because it `left` its loop."""

    attempt: int
    step: int
    left: bool = False


class Regroup(NamedTuple):
    """Members were lost or joined, and the others continue.

    `members` are those of membership `number`; samples are split among them from `step` or the step after it on. The
    samples in `missing` are not in the result of `step`, or not in every bucket, and are not trained again. `kept` buckets
    of the step were reduced with the gradients of the lost members, and `redone` without. Members in `behind` took the
    parameters of a member that was further. Members in `asleep` were suspended at the boundary before `step`.
    """

    attempt: int
    number: int
    step: int
    strategy: str
    members: Sequence[int]
    lost: Sequence[int] = ()
    missing: Sequence[int] = ()
    kept: int = 0
    redone: int = 0
    behind: Sequence[int] = ()
    seconds: float = 0.0
    asleep: Sequence[int] = ()


class Launch(NamedTuple):
    """A supervisor started the workers of its node, one of `nodes`, for the first time.

    If it `extends` the run, its plan may be longer than before. The script's arguments in `changed` differ from before.
    `source` is where the initial weights come from, and `weights` their digest, if they are not those of the script.
    """

    attempt: int
    workers: int
    argv: Sequence[str] = ()
    nodes: int = 1
    extends: bool = False
    changed: Sequence[str] = ()
    source: str | None = None
    weights: str | None = None


class Restart(NamedTuple):
    """A supervisor restarted the workers of its node; `newest` is the newest snapshot it saw, `left` the restarts left."""

    attempt: int
    workers: int
    newest: int | None = None
    left: int = 0


class Detect(NamedTuple):
    """A supervisor detected the failure of a worker, and its cause; a rank of -1 is on another node."""

    attempt: int
    rank: int
    local_rank: int
    kind: str
    message: str
    exit: int | None = None
    signal: str | None = None
    step: int | None = None


class Scale(NamedTuple):
    """A supervisor was asked for `workers` training workers, which are membership `number`; the others are suspended."""

    attempt: int
    workers: int
    number: int
    seconds: float = 0.0


class Preempt(NamedTuple):
    """A supervisor was asked to stop, and asked its workers."""

    attempt: int


class Judged(NamedTuple):
    """The end of a run, as its supervisor judges it."""

    verdict: str
    attempts: int
    because: str


_OfRank: TypeAlias = Attempt | Plan | Recover | Step | Save | Strike | Preempted | Stopped | Regroup
TrainingEvent: TypeAlias = _OfRank | Launch | Restart | Detect | Scale | Preempt | Judged
