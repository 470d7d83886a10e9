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
    pid: int  # the process id of the worker
    seed: int | None = None  # the seed of the run


class Plan(NamedTuple):
    """Event: the training plan of a rank: the samples, the seed of their order, and how often state is saved and compared."""

    attempt: int
    samples: int  # how many samples an epoch has; with `loader` how many batches, with `sampler` how many sample ids
    batch: int  # the number of samples in a step of all ranks (global batch)
    epochs: int  # the number of epochs
    seed: int  # the seed of the sample order
    save_every: int  # the steps between two snapshots
    writer: str  # `overlapped` or `blocking`
    config: str  # a digest of the sample order and the structure of the model
    data: str | None = None  # a digest of a few samples
    limit: int | None = None  # the number of steps after which the plan ends, within its last epoch
    extends: bool = False  # true if the plan may be longer than the previous plan
    command: str | None = None  # a digest of the script's arguments
    own: bool = False  # true if the script draws its samples itself
    loader: bool = False  # true if the script's own loader provides the batches
    sampler: str | None = None  # a digest of the first order that the script's sampler returned
    later_phases: "Sequence[Mapping[str, JSON]]" = ()  # the plans of the later training loops (phases) of the script
    tensor_parallel: int = 1  # the number of consecutive ranks that train the same samples
    sharded: bool = False  # true if each rank holds a part of the model
    witness_every: int | None = None  # the steps between two comparisons of the states of all ranks; null: never

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
    first: int  # the index of the first sample id of this piece
    width: int  # the bytes of a sample id
    indices: str  # the sample ids as base64


class Recover(NamedTuple):
    """Event: a rank begins to train at step `cursor` of `epoch`, with the state of a snapshot or the initial state."""

    attempt: int
    restored: int | None  # the step of the restored snapshot; null if none was restored
    epoch: int
    cursor: int
    rng: str  # the generators: `restored`: as saved; `none`: not as saved; `keyed`: none were saved for this rank
    seconds: float  # the time that the restore took
    passed_over: "Sequence[Mapping[str, JSON]]" = ()  # newer snapshots that could not be used, with the reasons
    state: str | None = None  # a digest of the protected state before the first step
    fingerprint: str | None = None  # a fingerprint, which must equal the fingerprint after the previous step
    weights: str | None = None  # a digest of the initial weights, if nothing was restored
    built: float | None = None  # the seconds from the `attempt` event to `run.protect`


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
    samples: Samples  # the number of samples that this rank trained, and a digest of their ids
    seconds: Seconds  # `data`: wait for the batch; `compute`: training (`device`: by CUDA events); `stall`: for a save
    state: str | None = None  # a fingerprint after the step: of state that all ranks share, then of the rank's own
    reduced: int = 0  # the number of backward passes with an all-reduce
    held: int = 0  # the number of backward passes without an all-reduce, which accumulate gradients
    stepped: int = 0  # the number of optimizer steps
    loss: float | None = None  # the loss of `run.log`


class Save(NamedTuple):
    """Event: a snapshot was saved, with the costs of this save."""

    attempt: int
    step: int
    writer: str  # `overlapped` or `blocking`
    bytes: int  # the bytes that this snapshot takes
    seconds: Stall  # `waited`: all time that training waited; up to `sync`: its parts; `overlapped`: background write
    retries: int = 0  # the number of times that a request to the storage was repeated


class Strike(NamedTuple):
    """Event: a failure of `kind` is about to be injected into `rank` at `point` of `step`, as `--inject` requested."""

    attempt: int
    step: int
    kind: str  # the kind of failure, such as `kill`
    rank: int
    point: str = "boundary"  # the point within the step, such as `backward=0.5`
    changed: str | None = None  # the bit that a flip changes: its tensor, value and number


class Witnessed(NamedTuple):
    """Event: before `step`, all ranks compared digests of their states, as `holdfast run --witness-every` requests.

    All states that must be equal were equal."""

    attempt: int
    step: int
    digest: str  # a digest of the parameters and optimizer state of this rank, or of its shard of them
    copy: str | None = None  # a digest of this rank's copy of the shard of the rank `apart` ranks before it
    group: int = 0  # ranks with the same number have the same state
    apart: int = 1  # the distance between a rank and the rank whose shard it copies


class Corruption(NamedTuple):
    """Event: a comparison before `step` (`--witness-every`) found that states of ranks differ or are not finite."""

    attempt: int
    step: int
    agreed: int | None  # the last step before which all ranks agreed
    ranks: Sequence[int]  # the ranks whose states differ
    culprit: int | None  # the rank that is wrong; null if unknown
    because: str  # a description of the difference
    digests: Sequence[str]  # a digest of the state of each rank
    copies: Sequence[str] = ()  # for each rank: a digest of its copy of the shard of the rank `apart` ranks before
    finite: bool = True  # false if the states are equal, but have become infinite or NaN
    apart: int = 1  # the distance between a rank and the rank whose shard it copies


class Preempted(NamedTuple):
    """Event: a rank saved its state and stopped, because its supervisor asked it to."""

    attempt: int
    step: int


class Stopped(NamedTuple):
    """Event: the script ended the run before its planned end, by `run.stop()` or by leaving its loop."""

    attempt: int
    step: int
    left: bool = False  # true if the script left its loop, false if it called `run.stop()`


class Regroup(NamedTuple):
    """Event: workers were lost or joined, and the workers that now train together (`members`) continue."""

    attempt: int
    number: int  # the number of the new group
    step: int  # the interrupted step; from this step or the next on, `members` share the samples
    strategy: str  # `replay`, `forward`, `skip` or `partial`
    members: Sequence[int]  # the workers that now train
    lost: Sequence[int] = ()  # the workers that were lost
    missing: Sequence[int] = ()  # the ids of samples that the result of `step`, or a part of it, lacks for good
    kept: int = 0  # the number of gradient buckets of `step` that include gradients of lost workers
    redone: int = 0  # the number of gradient buckets of `step` that were reduced again without lost workers
    behind: Sequence[int] = ()  # members that copied the parameters of a member further ahead
    seconds: float = 0.0  # the time that the recovery took
    asleep: Sequence[int] = ()  # members that were suspended before `step` began


GATHERED, SNAPSHOT, SURVIVORS = "gathered", "snapshot", "survivors"
"""Origins of a lost shard's values: gathered by a forward; a snapshot; zeros, and means over the surviving rows."""


class Reassembled(NamedTuple):
    """Event: this worker replaced a lost worker, and put its shard together from older values (`--recovery partial`).

    `parameters` and `moments` list the sources of these values. Each source has the `origin` of the values, the `step`
    from which they are, the names of the `parameters` that it filled, and `rows`, the number of rows filled."""

    attempt: int
    number: int  # the number of the group that the worker joined
    step: int  # the first step that the worker trains
    parameters: "Sequence[Mapping[str, JSON]]"  # the sources of the parameters
    moments: "Sequence[Mapping[str, JSON]]"  # the sources of the optimizer state
    rounded: str | None = None  # the dtype to which forward rounds the weights that it gathers


class Launch(NamedTuple):
    """Event: a command started or continued the run, and a supervisor started the workers of its node."""

    attempt: int
    workers: int  # the number of workers on this node
    argv: Sequence[str] = ()  # the script and its arguments
    nodes: int = 1  # the number of nodes of the whole run
    extends: bool = False  # true if the plan may be longer than before
    changed: Sequence[str] = ()  # arguments that differ from the previous command
    source: str | None = None  # where the initial weights are from
    weights: str | None = None  # a digest of the initial weights


class Restart(NamedTuple):
    """Event: a supervisor restarts the workers of its node after a failure."""

    attempt: int
    workers: int  # the number of workers on this node
    newest: int | None = None  # the step of the newest snapshot; null if there is none
    left: int = 0  # how many more restarts are allowed


class Detect(NamedTuple):
    """Event: a supervisor detected the failure of a worker, or the return of a node."""

    attempt: int
    rank: int  # the rank of the worker; -1 if unknown, for example on another node
    local_rank: int  # the number of the worker on its node
    kind: str  # the kind of failure, such as `signal` or `hang`
    message: str  # a description of the failure
    exit: int | None = None  # the exit status of the process
    signal: str | None = None  # the signal that ended the process
    step: int | None = None  # the step in which the worker failed


class Straggler(NamedTuple):
    """Event: a rank is slower than the other ranks, or a node is slower than the other nodes.

    The supervisor repeats the event with a larger `until` while the rank or node stays slow."""

    attempt: int
    rank: int | None  # the slow rank; null if a whole node is slow
    step: int  # the first slow step
    until: int  # the step after its latest slow step
    ratio: float  # the rank's time for its part of a step, divided by that of the others
    seconds: float  # the time that the other workers waited for this rank, from `step` to `until`
    node: int | None = None  # the slow node; null if only a rank is slow

    @property
    def name(self) -> str:
        """The name of the slow rank or node, such as "rank 2"."""
        return f"rank {self.rank}" if self.node is None else f"node {self.node}"


class Scale(NamedTuple):
    """Event: `holdfast scale` changed the number of workers that train; all other workers are suspended."""

    attempt: int
    workers: int  # the number of workers that train now
    number: int  # the number of the new group of training workers
    seconds: float = 0.0  # the time that the change took


class Preempt(NamedTuple):
    """Event: a supervisor received a stop signal such as SIGTERM, and asked its workers to save and stop."""

    attempt: int


class Judged(NamedTuple):
    """Event: the run ended, and a supervisor recorded how."""

    verdict: str  # `completed`, `gave-up`, `preempted`, `refused` or `script-error`
    attempts: int  # the number of attempts
    because: str  # the reason for the verdict


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
