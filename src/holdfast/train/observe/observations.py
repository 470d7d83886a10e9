"""What a rehearsed worker sees of one window, as it writes it down: marks of everything that its script holds. Pure.

A mark is a short text that stands for a value: a plain value itself, of a tensor its type, shape and digest. Two marks
are equal if and only if the values are, bit by bit.

How long a rehearsal is, where it saves, and before which steps it is killed. Pure.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias

from holdfast.errors import Corrupt

LONGEST = 100  # steps, unless more are asked for
REPLAYED = 3  # steps between a save and a random kill, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A rank is killed before this step, and the run goes on from the state that was saved before that one."""

    step: int
    saved: int
    rank: int
    why: str


def length(asked: int | None, steps: int, per_epoch: int) -> int:
    """How many steps to train: as many as asked for, or the first two ends of epochs and half an epoch more."""
    wanted = min(2 * per_epoch + (per_epoch + 1) // 2, LONGEST) if asked is None else asked
    return max(1, min(wanted, steps))


def kills(steps: int, per_epoch: int, *, ranks: int, at_random: int, seed: int) -> tuple[Kill, ...]:
    """At the ends of epochs, right after a save and before one, and at random steps; at most one before each step."""
    draw = random.Random(seed)
    found: dict[int, Kill] = {}

    def add(step: int, saved: int, why: str) -> None:
        if 0 < step < steps and step not in found:
            # Where it is saved and killed at once, rank 0, which writes: of another the save might wait in vain.
            rank = draw.randrange(ranks) * (saved < step)
            found[step] = Kill(step=step, saved=max(0, saved), rank=rank, why=why)

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
    return tuple(found[step] for step in sorted(found))


def saves(several: tuple[Kill, ...]) -> tuple[int, ...]:
    """The steps before which the state is saved."""
    return tuple(sorted({each.saved for each in several}))


Marks: TypeAlias = Mapping[str, str]  # by where the value is, such as model/0.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprotectedValue:
    """Something that the script holds and does not protect: what it is, and its mark."""

    kind: str  # generator, scheduler, optimizer, buffer, tensor or value
    type: str
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window of one rank, from when it was handed out until the script asked for the next."""

    rank: int
    attempt: int
    step: int
    epoch: int
    ids: str  # of the samples
    batch: str  # of what was handed out
    drawn: Marks  # the generators of Python, numpy and torch, when it was handed out
    begun: Marks  # the protected state, of large tensors a few values: when it was handed out
    midway: Marks | None  # the same when its first gradient was there; nothing if none came
    after: Marks  # the protected state, every bit of it, when the next window was asked for
    held: Mapping[str, UnprotectedValue]  # when it was handed out
    kept: Mapping[str, UnprotectedValue]  # when the next window was asked for
    backwards: int
    stepped: int  # times that an optimizer did


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a rank did once no window was left."""

    rank: int
    attempt: int
    backwards: int
    stepped: int


Observed: TypeAlias = Window | Ending


def line(what: Observed) -> str:
    """The observation as one line."""
    return json.dumps({"what": type(what).__name__, **asdict(what)}) + "\n"


def parse(text: str) -> Observed:
    """The inverse of `line`."""
    try:
        data = json.loads(text)
        if data.pop("what") == "Ending":
            return Ending(**data)
        for name in ("held", "kept"):
            data[name] = {path: UnprotectedValue(**each) for path, each in data[name].items()}
        return Window(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"not what a rehearsed worker writes: {text!r:.80}") from error


def windows(several: Iterable[Observed]) -> list[Window]:
    """The windows among them, in the order in which they were trained."""
    found = [each for each in several if isinstance(each, Window)]
    return sorted(found, key=lambda each: (each.attempt, each.step, each.rank))


def endings(several: Iterable[Observed]) -> list[Ending]:
    """What was done after the last window, by those that came to it."""
    return [each for each in several if isinstance(each, Ending)]


def differing(one: Marks, other: Marks) -> list[str]:
    """Where two states differ; what only one of them has, too."""
    return [path for path in dict.fromkeys((*one, *other)) if one.get(path) != other.get(path)]


def is_tensor(mark: str | None) -> bool:
    """Whether a mark stands for a tensor."""
    return mark is not None and mark.startswith("tensor ")
