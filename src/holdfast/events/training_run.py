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
    """A rank began an attempt (one start of all workers), with the seed of the run."""

    attempt: int
    world: int
    rank: int
    pid: int
    seed: int | None = None


class Plan(NamedTuple):
    """The plan of a rank: the number of samples, their order, and how often state is saved.

    With a `limit` the plan ends after that many steps, within its last epoch. A plan that `extends` the run may be
    longer than before. `data` is a digest of a few samples, and `command` of the script's arguments. If `own`, the
    script draws its samples itself. If `loader`, its own loader provides batches, and `samples` counts the batches of
    all ranks.
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
    """The state that a rank begins with: the snapshot of step `restored`, or None, and the position of the next step.

    `state` is a digest of the protected state in memory when the first step begins. `fingerprint` is its fingerprint,
    as the previous step recorded it. `weights` is a digest of the initial weights, if nothing was restored.
    `passed_over` lists snapshots that could not be used.
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
    """The seconds of a step: waiting for data (`data`), training (`compute`), waiting for a save before it (`stall`).

    `compute` is measured on the device if `device` is set, otherwise in the process.
    """

    data: float
    compute: float
    stall: float
    device: bool = False


class Step(NamedTuple):
    """A rank trained its share of a step's samples.

    `state` is a fingerprint of the resulting state: its first half covers state that all ranks share, its second half
    the rank's own. `reduced` backward passes were all-reduced and `held` were not; optimizers took `stepped` steps.
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
    """The cost of a save: how long training waited and why, and how often a storage operation was retried."""

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
    """A rank saved and stopped because its supervisor requested it."""

    attempt: int
    step: int


class Stopped(NamedTuple):
    """The script ended the run before its planned end, by `run.stop()` or, if `left`, by leaving its loop."""

    attempt: int
    step: int
    left: bool = False


class Regroup(NamedTuple):
    """Members (workers that train together) were lost or joined, and the others continue without a restart.

    `members` are those of membership `number`; samples are split among them from `step` or the step after it on. The
    samples in `missing` are absent from the result of `step`, or from a part of it, and are not trained again. `kept`
    gradient buckets of the step include the lost members, and `redone` ones do not. Members in `behind` took the
    parameters of a member that was further ahead. Members in `asleep` were suspended at the boundary before `step`.
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
    `source` is the place of the initial weights, and `weights` their digest, if the script does not make them.
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
    """A supervisor restarted the workers of its node; `newest` is the newest snapshot, `left` the restarts left."""

    attempt: int
    workers: int
    newest: int | None = None
    left: int = 0


class Detect(NamedTuple):
    """A supervisor detected the failure of a worker; `rank` is -1 if the worker is on another node."""

    attempt: int
    rank: int
    local_rank: int
    kind: str
    message: str
    exit: int | None = None
    signal: str | None = None
    step: int | None = None


class Scale(NamedTuple):
    """A requested number of `workers` now train, as membership `number`, and the other workers are suspended."""

    attempt: int
    workers: int
    number: int
    seconds: float = 0.0


class Preempt(NamedTuple):
    """A supervisor was asked to stop, and asked its workers to save and stop."""

    attempt: int


class Judged(NamedTuple):
    """The end of a run: its supervisor's verdict, the number of attempts, and the reason."""

    verdict: str
    attempts: int
    because: str


_OfRank: TypeAlias = Attempt | Plan | Recover | Step | Save | Strike | Preempted | Stopped | Regroup
TrainingEvent: TypeAlias = _OfRank | Launch | Restart | Detect | Scale | Preempt | Judged
