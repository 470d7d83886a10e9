"""Events of a training run, written by its ranks, its supervisors and its fault injection."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from holdfast.events.any_run import JSON
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

# Beginnings of the reasons that a supervisor gives for its verdict.
SECOND_SIGNAL = "killed by a second signal"
SUPERVISED_ONLY = "supervised only: restarted after failures, not checked"


# Named tuples: a long run has an event for every step of every rank, and tuples are small and quick to make.
class Attempt(NamedTuple):
    """Event: a worker process started in an attempt, which lasts from one start of all workers to the next.

    `seed` is the seed of the run."""

    attempt: int
    world: int
    rank: int
    pid: int
    seed: int | None = None


class Plan(NamedTuple):
    """Event: the training plan of a rank: the number of samples, the seed of their order, and how often state is saved.

    With a `limit` the plan ends after that many steps, within its last epoch. A plan that `extends` the run may be
    longer than before. `data` is a digest of a few samples, and `command` of the script's arguments. If `own`, the
    script draws its samples itself. If `loader`, its own loader provides batches, and `samples` counts these batches.
    With a `sampler`, a digest of its first order, `samples` counts the samples that it returns for each epoch.
    `later_phases` describe the phases after the first, each by its own samples, batch, epochs and so on.
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
    sampler: str | None = None
    later_phases: "Sequence[Mapping[str, JSON]]" = ()

    @property
    def steps(self) -> int:
        """The number of steps in all phases."""
        return sum(_steps(phase) for phase in (self._asdict(), *self.later_phases))


def _steps(phase: Mapping[str, Any]) -> int:
    limit, length = phase.get("limit"), phase["samples"] // max(1, phase["batch"])
    return int(length * phase["epochs"] if limit is None else limit)


class Order(NamedTuple):
    """Event: a piece of the sample order that the script's sampler returned for `epoch`, beginning at index `first`.

    `indices` are sample ids of `width` bytes each, as base64."""

    attempt: int
    epoch: int
    first: int
    width: int
    indices: str


class Recover(NamedTuple):
    """Event: a rank begins to train at batch `cursor` of `epoch`, from the snapshot of step `restored` if not None.

    `rng` is `restored` if the random generators now equal the snapshot's, `none` if they differ, and `keyed` if the
    snapshot has none for this rank. `state` is a digest of the protected state before the first step. `fingerprint` is
    a hash of a few of its values, which must equal the one after the previous step. `weights` is a digest of the
    initial weights, if nothing was restored. `passed_over` lists snapshots that could not be used. `built` is the time
    from the `attempt` event to `run.protect`, and `seconds` the time that the restore took there."""

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
    built: float | None = None


class Seconds(NamedTuple):
    """The seconds that a step waited for its batch (`data`), trained (`compute`), and waited for a save (`stall`).

    If `device` is True, `compute` is measured with CUDA events, otherwise with the clock of the process."""

    data: float
    compute: float
    stall: float
    device: bool = False


class Step(NamedTuple):
    """Event: a rank trained its part of the samples of a step.

    `state` is a fingerprint of the resulting state: the first half covers state that is equal on all ranks, the second
    half the rank's own. The gradients of `reduced` backward passes were all-reduced, those of `held` passes accumulated
    without a reduction. Optimizers took `stepped` steps."""

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
    """Event: a snapshot was saved, with the seconds that training waited and the number of storage retries."""

    attempt: int
    step: int
    writer: str
    bytes: int
    seconds: Stall
    retries: int = 0


class Strike(NamedTuple):
    """Event: a failure of `kind` is about to be injected into `rank` at `point` of `step`."""

    attempt: int
    step: int
    kind: str
    rank: int
    point: str = "boundary"


class Preempted(NamedTuple):
    """Event: a rank saved its state and stopped, because its supervisor asked it to."""

    attempt: int
    step: int


class Stopped(NamedTuple):
    """Event: the script ended the run before its planned end: by `run.stop()`, or (`left`) by leaving its loop."""

    attempt: int
    step: int
    left: bool = False


class Regroup(NamedTuple):
    """Event: workers were lost or joined, and the workers that train together (`members`) continue without a restart.

    `number` is that of the new group. The samples are split among `members` from `step` or the step after it. Samples
    in `missing` are absent from the result of `step`, or from a part of it, and are not trained again. Of the gradient
    buckets of `step`, `kept` include the gradients of lost workers and `redone` do not. Members in `behind` copied the
    parameters of a member that was further ahead. Members in `asleep` were suspended before `step` began."""

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
    """Event: the supervisor of a new command started the workers of its node; `nodes` is the number of all nodes.

    If the command `extends` the run, its plan may be longer than before. `changed` lists the script's arguments that
    differ from the previous command. `source` tells where the initial weights are from, and `weights` is their digest.
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
    """Event: a supervisor restarted its workers from the `newest` snapshot; `left` is the number of restarts left."""

    attempt: int
    workers: int
    newest: int | None = None
    left: int = 0


class Detect(NamedTuple):
    """Event: a supervisor detected the failure of a worker; `rank` is -1 if the worker is on another node."""

    attempt: int
    rank: int
    local_rank: int
    kind: str
    message: str
    exit: int | None = None
    signal: str | None = None
    step: int | None = None


class Scale(NamedTuple):
    """Event: the number of training workers was changed to `workers` on request; all other workers are suspended.

    The change took `seconds`, and `number` is the number of the new group of training workers."""

    attempt: int
    workers: int
    number: int
    seconds: float = 0.0


class Preempt(NamedTuple):
    """Event: a supervisor was asked to stop, and asked its workers to save and stop."""

    attempt: int


class Judged(NamedTuple):
    """Event: the run ended; with the supervisor's verdict, the reason for it, and the number of attempts."""

    verdict: str
    attempts: int
    because: str


_OfRank: TypeAlias = Attempt | Plan | Order | Recover | Step | Save | Strike | Preempted | Stopped | Regroup
TrainingEvent: TypeAlias = _OfRank | Launch | Restart | Detect | Scale | Preempt | Judged
