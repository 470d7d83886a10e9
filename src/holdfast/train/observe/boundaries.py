"""How long a rehearsal is, where it saves, and before which steps it is killed. Pure."""

import random
from dataclasses import dataclass

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
