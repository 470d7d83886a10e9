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
    """Event: a worker process started in an attempt, which lasts from one start of all workers to the next."""

    attempt: int
    world: int
    rank: int
    pid: int
    seed: int | None = None  # of the run


class Plan(NamedTuple):
    """Event: the training plan of a rank: the samples, the seed of their order, and how often state is saved."""

    attempt: int
    samples: int  # of an epoch; with `loader`, its batches; with `sampler`, what that returns
    batch: int
    epochs: int
    seed: int
    save_every: int
    writer: str
    config: str
    data: str | None = None  # a digest of a few samples
    limit: int | None = None  # steps after which the plan ends, within its last epoch
    extends: bool = False  # it may be longer than the plan before
    command: str | None = None  # a digest of the script's arguments
    own: bool = False  # the script draws its samples itself
    loader: bool = False  # the script's own loader provides batches
    sampler: str | None = None  # a digest of the first order of the script's sampler
    later_phases: "Sequence[Mapping[str, JSON]]" = ()
    tensor_parallel: int = 1  # that many consecutive ranks train the same samples
    sharded: bool = False  # each rank holds a part of the model

    @property
    def steps(self) -> int:
        """The number of steps in all phases."""
        return sum(_steps(phase) for phase in (self._asdict(), *self.later_phases))


def _steps(phase: Mapping[str, Any]) -> int:
    limit, length = phase.get("limit"), phase["samples"] // max(1, phase["batch"])
    return int(length * phase["epochs"] if limit is None else limit)


class Order(NamedTuple):
    """Event: a piece of the sample order that the script's sampler returned for `epoch`, beginning at index `first`."""

    attempt: int
    epoch: int
    first: int
    width: int  # bytes of a sample id
    indices: str  # sample ids as base64


class Recover(NamedTuple):
    """Event: a rank begins to train at batch `cursor` of `epoch`; `restored` is the step of its snapshot, or None."""

    attempt: int
    restored: int | None
    epoch: int
    cursor: int
    rng: str  # `restored`: the generators equal the snapshot's; `none`: they differ; `keyed`: it has none for this rank
    seconds: float  # that the restore took
    passed_over: "Sequence[Mapping[str, JSON]]" = ()  # snapshots that could not be used
    state: str | None = None  # a digest of the protected state before the first step
    fingerprint: str | None = None  # a hash of a few of its values, which must equal the one after the previous step
    weights: str | None = None  # a digest of the initial weights, if nothing was restored
    built: float | None = None  # seconds from the `attempt` event to `run.protect`


class Seconds(NamedTuple):
    """The seconds that a step waited for its batch (`data`), trained (`compute`), and waited for a save (`stall`)."""

    data: float
    compute: float
    stall: float
    device: bool = False  # `compute` was measured with CUDA events, not with the clock of the process


class Step(NamedTuple):
    """Event: a rank trained its part of the samples of a step."""

    attempt: int
    world: int
    rank: int
    epoch: int
    cursor: int
    step: int
    samples: Samples
    seconds: Seconds
    state: str | None = None  # a fingerprint of the result: first of state that all ranks share, then of the rank's own
    reduced: int = 0  # backward passes with an all-reduce
    held: int = 0  # backward passes without one, which accumulate
    stepped: int = 0  # optimizer steps
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
    changed: str | None = None  # the bit that a flip changes: its tensor, value and number


class Witnessed(NamedTuple):
    """Event: all ranks compared their states before `step`, and none was wrong. The digests are those of this rank."""

    attempt: int
    step: int
    digest: str  # of the parameters and optimizer state, or of the rank's shard of them
    copy: str | None = None  # of its copy of the shard of the rank that is `apart` ranks before it
    group: int = 0  # the ranks with the same number have the same state
    apart: int = 1


class Corruption(NamedTuple):
    """Event: the states of `ranks` differ before `step`, although all ranks agreed before step `agreed`."""

    attempt: int
    step: int
    agreed: int | None
    ranks: Sequence[int]
    culprit: int | None  # the rank that is wrong
    because: str
    digests: Sequence[str]  # of the states of all ranks
    copies: Sequence[str] = ()  # of the copies that they keep, each of the rank that is `apart` ranks before it
    finite: bool = True  # False if the states are equal, but have become infinite or NaN
    apart: int = 1


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
    """Event: workers were lost or joined, and the workers that now train together (`members`) continue."""

    attempt: int
    number: int  # of the new group
    step: int  # from this step or the next, samples are split among `members`
    strategy: str
    members: Sequence[int]
    lost: Sequence[int] = ()
    missing: Sequence[int] = ()  # samples that the result of `step`, or a part of it, lacks for good
    kept: int = 0  # gradient buckets of `step` with the gradients of lost workers
    redone: int = 0  # gradient buckets without them
    behind: Sequence[int] = ()  # members that copied the parameters of one further ahead
    seconds: float = 0.0
    asleep: Sequence[int] = ()  # members that were suspended before `step` began


GATHERED, SNAPSHOT, SURVIVORS = "gathered", "snapshot", "survivors"
"""Origins of a lost shard's values: gathered by a forward; a snapshot; zeros, and means over the surviving rows."""


class Reassembled(NamedTuple):
    """Event: this worker replaced a lost one, and put its shard together from values of earlier steps (`partial`).

    `parameters` and `moments` (the state of optimizers) are lists of sources. Each has its `origin`, its `step`, the
    names of the `parameters`, and the number of their lost `rows`."""

    attempt: int
    number: int  # of the group that the worker joined
    step: int  # that it trains first
    parameters: "Sequence[Mapping[str, JSON]]"
    moments: "Sequence[Mapping[str, JSON]]"
    rounded: str | None = None  # the dtype to which forward rounds the weights that it gathers


class Launch(NamedTuple):
    """Event: the user started or continued the run with a command, and a supervisor started its node's workers."""

    attempt: int
    workers: int
    argv: Sequence[str] = ()
    nodes: int = 1  # of the whole run
    extends: bool = False  # the plan may be longer than before
    changed: Sequence[str] = ()  # arguments that differ from the previous command
    source: str | None = None  # where the initial weights are from
    weights: str | None = None  # their digest


class Restart(NamedTuple):
    """Event: a supervisor restarts its workers from the snapshot of step `newest`; `left` more restarts are allowed."""

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


class Straggler(NamedTuple):
    """Event: since `step`, `rank` computes its own part of a step `ratio` times as long as the other workers.

    The supervisor repeats the event with a larger `until`, at which the rank was still slow, and at the end. If all
    workers of a node are slow, there is `node` instead of a rank, compared with the other nodes."""

    attempt: int
    rank: int | None
    step: int
    until: int
    ratio: float
    seconds: float  # that the other workers waited for this rank, from `step` to `until`
    node: int | None = None

    @property
    def name(self) -> str:
        """The name of the slow rank or node, such as "rank 2"."""
        return f"rank {self.rank}" if self.node is None else f"node {self.node}"


class Scale(NamedTuple):
    """Event: the number of training workers was changed to `workers` on request; all other workers are suspended."""

    attempt: int
    workers: int
    number: int  # of the new group of training workers
    seconds: float = 0.0  # that the change took


class Preempt(NamedTuple):
    """Event: a supervisor was asked to stop, and asked its workers to save and stop."""

    attempt: int


class Judged(NamedTuple):
    """Event: the run ended, with the supervisor's verdict, the reason (`because`), and the number of attempts."""

    verdict: str
    attempts: int
    because: str


_OfRank: TypeAlias = (
    Attempt
    | Plan
    | Order
    | Recover
    | Step
    | Save
    | Strike
    | Preempted
    | Stopped
    | Witnessed
    | Corruption
    | Regroup
    | Reassembled
)
TrainingEvent: TypeAlias = _OfRank | Launch | Restart | Detect | Straggler | Scale | Preempt | Judged
