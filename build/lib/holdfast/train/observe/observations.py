"""The plan of a rehearsal (its length, saves and kills), and the observations of its workers in each step. No I/O.

A mark is a short text that stands for a value: a plain value itself, or the type, shape and digest of a tensor. Two
marks are equal if and only if the two values are equal, bit by bit.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

from holdfast.errors import Corrupt

LONGEST = 100  # steps, unless more are requested
REPLAYED = 3  # steps between a save and a random kill, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A planned kill of `rank` before `step` in a test run, which then resumes from the snapshot of step `saved`.

    `why` describes the moment, for example "the end of an epoch"."""

    step: int
    saved: int
    rank: int
    why: str


def length(asked: int | None, steps: int, per_epoch: int) -> int:
    """Return the number of steps that a test run trains: `asked`, or by default 2.5 epochs, but at most LONGEST.

    It is never more than `steps`, the length of the whole training. `per_epoch` is the number of steps in an epoch."""
    wanted = min(2 * per_epoch + (per_epoch + 1) // 2, LONGEST) if asked is None else asked
    return max(1, min(wanted, steps))


def kills(steps: int, per_epoch: int, *, ranks: int, at_random: int, seed: int) -> tuple[Kill, ...]:
    """Return the kills of a test run: near ends of epochs, inside an epoch, and at `at_random` random steps."""
    draw = random.Random(seed)
    planned: dict[int, Kill] = {}

    def add(step: int, saved: int, why: str) -> None:
        if 0 < step < steps and step not in planned:
            # Rank 0 writes the saves: if another rank died in a step with a save, the save might wait for it in vain.
            rank = draw.randrange(ranks) * (saved < step)
            planned[step] = Kill(step=step, saved=max(0, saved), rank=rank, why=why)

    ends = range(per_epoch, steps, per_epoch)
    for end in ends[:1]:
        add(end, end, "the end of an epoch")
    for end in ends[1:2]:
        add(end + 1, end - 1, "just after the end of an epoch")
    middle = min(per_epoch, steps) // 2
    add(middle, middle, "in an epoch")
    add(middle + 1, middle, "in an epoch")
    add(steps - 1, steps - 3, "near the last step")
    for _ in range(at_random):
        step = draw.randrange(1, steps) if steps > 1 else 0
        add(step, step - draw.randint(0, REPLAYED), "at random")
    return tuple(planned[step] for step in sorted(planned))


Marks: TypeAlias = Mapping[str, str]  # by path, such as model/0.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprotectedValue:
    """A value in the script's memory that a restart would lose. `mark` is its value, or a digest of it."""

    kind: str  # generator, scheduler, optimizer, scaler, module, buffer, tensor or value
    type: str
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Observations of one rank in one step, from getting its batch to requesting the next batch.

    `drawn` has the state of the random generators at the start. `begun`, `midway` and `after` have the protected state
    at the start, at the first gradient, and at the end. `held` and `kept` are the unprotected values at the start and
    at the end. All states are digests."""

    rank: int
    attempt: int
    step: int
    epoch: int
    ids: str  # the mark of the sample ids
    batch: str  # the mark of the data in the batch
    drawn: Marks  # the random generators of Python, numpy and torch when the batch was handed out
    begun: Marks  # the protected state at that time (of large tensors, a few values)
    midway: Marks | None  # the same at the step's first gradient; None if there was no gradient
    after: Marks  # every bit of the protected state when the next batch was requested
    held: Mapping[str, UnprotectedValue]  # when the batch was handed out
    kept: Mapping[str, UnprotectedValue]  # when the next batch was requested
    backwards: int
    stepped: int  # optimizer steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The numbers of backward passes and optimizer steps that a rank made after its last complete step."""

    rank: int
    attempt: int
    backwards: int
    stepped: int


Observed: TypeAlias = Window | Ending


def line(observed: Observed) -> str:
    """Return the observation as one line of JSON."""
    return json.dumps({"what": type(observed).__name__, **asdict(observed)}) + "\n"


def parse(text: str) -> Observed:
    """Return the observation in `text`, written by the function `line`; raise Corrupt for any other text."""
    try:
        data = json.loads(text)
        if data.pop("what") == "Ending":
            return Ending(**data)
        for name in ("held", "kept"):
            data[name] = {path: UnprotectedValue(**value) for path, value in data[name].items()}
        return Window(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"Not an observation of a rehearsal: {text!r:.80}.") from error


def windows(observed: Iterable[Observed]) -> list[Window]:
    """Return only the observations of steps, sorted by attempt (start of all workers), step and rank."""
    found = [window for window in observed if isinstance(window, Window)]
    return sorted(found, key=lambda window: (window.attempt, window.step, window.rank))


def differing(one: Marks, other: Marks) -> list[str]:
    """Return the paths of the values that differ between two states, or that only one state has."""
    return [path for path in dict.fromkeys((*one, *other)) if one.get(path) != other.get(path)]


def is_tensor(mark: str | None) -> bool:
    """Return True if `mark`, the text that describes a value, describes a tensor."""
    return mark is not None and mark.startswith("tensor ")
