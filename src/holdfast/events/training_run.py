"""Events of a training run: what its ranks and supervisors tell."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.events.common import JSON
from holdfast.sampler.digest import Samples
from holdfast.stall import Stall

# What a supervisor says with its verdict, where that explains what ranks say.
SECOND_SIGNAL = "killed by a second signal"
SUPERVISED_ONLY = "supervised only: restarted after failures, not checked"


# Tuples: a long run has a step for every rank and window, and a tuple is small and quickly made.
class Attempt(NamedTuple):
    """A rank has begun an attempt of a run with this seed."""

    attempt: int
    world: int
    rank: int
    pid: int
    seed: int | None = None


class Plan(NamedTuple):
    """What a rank is to train: so many samples, in which order, saved how; `data` is a digest of a few of them.

    With a `limit` the plan ends after so many steps, within the last epoch. One that `extends` the run may be longer than
    those before it. `command` is a digest of what the script was given. If the samples are the script's `own`, it draws
    them itself, and the order is none of theirs. If a `loader` gives them, the batches of all ranks are counted as samples.
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
    """What a rank begins with: the snapshot of step `restored`, or nothing (null), and the window it goes on with.

    `state` is a digest of what is protected, as it is in memory when the first step begins, and `fingerprint` is the
    fingerprint of that: of the step before, as whoever trained it told. `weights` is a digest of the source that a run
    began with, where nothing came back.
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
    """What a step took: waiting for its data, training, and before that waiting for a save.

    `compute` is measured on the device where there is one (`device`), else it is what the process took.
    """

    data: float
    compute: float
    stall: float
    device: bool = False


class Step(NamedTuple):
    """A rank has trained its share of a window.

    `state` is a fingerprint of the state that came out: its first half of what all ranks share, its second of what is a
    rank's own. Of the replicated models, `reduced` backward passes were summed over the ranks and `held` were kept
    back; optimizers took `stepped` steps.
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
    """What a save cost: how long training waited, for what, and how often the storage had to be asked again."""

    attempt: int
    step: int
    writer: str
    bytes: int
    seconds: Stall
    retries: int = 0


class Strike(NamedTuple):
    """A failure of the schedule is about to strike."""

    attempt: int
    step: int
    kind: str
    rank: int
    point: str = "boundary"


class Preempted(NamedTuple):
    """A rank was asked to stop, and did so in order."""

    attempt: int
    step: int


class Stopped(NamedTuple):
    """The script has stopped the run here, before its planned end: nothing is left to train. It may have `left` its loop."""

    attempt: int
    step: int
    left: bool = False


class Regroup(NamedTuple):
    """Members were lost or joined, and those that are there go on together, each as it stood.

    `members` are those of membership `number`; windows from `step` on, or the one after it, are divided among them. The
    samples in `missing` had no part, or not in every bucket, in what came out of window `step`, and are not trained
    again. Of its buckets `kept` were summed with the lost ones' gradients, and `redone` without. Members in `behind`
    took over the parameters of one that was further. Those in `asleep` left in order, at the boundary before `step`.
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
    """A supervisor has started the workers of its node, one of so many, for the first time.

    If it `extends` the run, its plan may be longer than before. Of the script's arguments those in `changed` differ.
    `source` is where the first weights of the run come from, and `weights` their digest, if the script does not draw them.
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
    """A supervisor has started the workers of its node again; `newest` is the newest snapshot it saw."""

    attempt: int
    workers: int
    newest: int | None = None
    left: int = 0


class Detect(NamedTuple):
    """A supervisor has seen a worker fail, and of what; a rank of -1 is on another node."""

    attempt: int
    rank: int
    local_rank: int
    kind: str
    message: str
    exit: int | None = None
    signal: str | None = None
    step: int | None = None


class Scale(NamedTuple):
    """A supervisor was asked to have so many workers train, and they do, in membership `number`; the others sleep."""

    attempt: int
    workers: int
    number: int
    seconds: float = 0.0


class Preempt(NamedTuple):
    """A supervisor was asked to stop, and has told its workers."""

    attempt: int


class Judged(NamedTuple):
    """How a supervisor says that the run ended."""

    verdict: str
    attempts: int
    because: str
