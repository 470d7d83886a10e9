"""Whether steps that were trained again after a restore came out the same, and all ranks had the same state.

Steps are compared that were trained from the same past: sums over another number of ranks round otherwise, and so does
all that follows from them. So do sums that members were lost in, or that those took who were left. A script that was
given other arguments, by declaration, may do anything else.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.finding import Verdict, counted
from holdfast.history.lineage import EVERY_STEP
from holdfast.sampler.plan import Position

# Numbers of ranks, or what else steps depend on, each with the step from which on it was so.
Worlds: TypeAlias = tuple[tuple[int, object], ...]
Rows: TypeAlias = "NDArray[np.intp] | slice"


class Unlike(NamedTuple):
    """A step that came out otherwise when it was trained again."""

    step: int
    who: str
    what: str
    first: int
    again: int


class StepRange(NamedTuple):
    """The steps of a life from one to another, that without."""

    life: Life
    first: int
    end: int


@dataclass(slots=True)
class Replays:
    """What comparing the steps that were trained again has shown."""

    same: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)  # a fingerprint is missing
    apart: set[int] = field(default_factory=set)  # trained by another number of ranks only
    unlike: list[Unlike] = field(default_factory=list)
    same_on_first: set[int] = field(default_factory=set)  # on rank 0


def replayed_steps_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """Steps that were trained again came out the same to the bit, and ranks that trained together have one state."""
    length = ledger.geometry.steps_per_epoch
    for number in ledger.attempts:
        if because := _ranks_apart(ledger, number):
            return "fail", because
    found = replays(ledger)
    if found.unlike:
        step, who, what, first, again = min(found.unlike, key=lambda each: (each.again, each.step, each.who))
        at = Position(*divmod(step, length))
        other = f"{at} (step {step}) came out with another {what} in attempt {again} than in {first} ({who})"
        return "fail", f"{other}{_of_its_own(found, step, who)}"
    replayed = len(found.same | found.untold)
    left = (
        f"; {counted(len(found.apart), 'step')} trained again by another number of ranks{_given(ledger)}"
        if found.apart
        else ""
    )
    if found.untold:
        return "unknown", f"{len(found.untold)} of {counted(replayed, 'replayed step')} without a fingerprint{left}"
    if because := next(filter(None, (_untold(ledger, number) for number in ledger.attempts)), None):
        return "unknown", because
    if not replayed:
        return "pass", f"no step was trained again by as many ranks{left}" if left else "no step was trained again"
    return "pass", f"{replayed} of {counted(replayed, 'replayed step')} came out the same{left}"


def _of_its_own(found: Replays, step: int, who: str) -> str:
    """What may be the reason where only other ranks than rank 0 came out otherwise, as a part of a sentence."""
    if step not in found.same_on_first or any(each.who == "rank-0" for each in found.unlike):
        return ""
    return (
        f", and rank-0 came out the same: a snapshot holds what rank 0 protects, and {who} had something of its own (for "
        "instance an average of BatchNorm's buffers)"
    )


def _given(ledger: Ledger) -> str:
    return " or with other arguments" if len({*_commands(ledger).values()}) > 1 else ""


def replays(ledger: Ledger) -> Replays:
    """Every step that was trained again, compared with the first that was trained from the same past."""
    found = Replays()
    before: defaultdict[tuple[Worlds, int], list[StepRange]] = defaultdict(list)
    worlds: Worlds = ()
    commands = _commands(ledger)
    reached = 0
    for number, lives in ledger.attempts.items():
        compared: set[int] = set()
        for first, end, what in _divided(ledger, number) if any(len(life.steps) for life in lives) else ():
            worlds = _continued(worlds, first, (what, commands[number]))
            for life in lives:
                void = ledger.memberships(number).void(life)
                part = StepRange(life, max(first, life.start), min(end, life.reached if void is None else void))
                compared |= _compare_all(before[worlds, life.rank], part, found)
                before[worlds, life.rank] = _covering(before[worlds, life.rank], part)
        steps = {step for life in lives for step in life.steps.step[life.steps.step < reached].tolist()}
        found.apart |= steps - compared
        reached = max([reached, *(life.reached for life in lives if len(life.steps))])
    return found


def _commands(ledger: Ledger) -> dict[int, str | None]:
    """What the script was given in each attempt: where no rank tells, as before, and before that as it was told first."""
    told: dict[int, str | None] = dict.fromkeys(ledger.attempts)
    for life, plan in ledger.plans:
        told[life.number or 0] = told[life.number or 0] or plan.command
    last = next((command for command in told.values() if command), None)
    for number, command in told.items():
        last = told[number] = command or last
    return told


def aligned(a: Life, b: Life) -> tuple[Rows, Rows]:
    """The rows of two lives that are of the same steps."""
    x, y = a.steps.step, b.steps.step
    if len(x) and len(y) and a.steps.is_run and b.steps.is_run:
        first, end = max(x[0], y[0]), max(min(x[-1], y[-1]) + 1, max(x[0], y[0]))
        return slice(first - x[0], end - x[0]), slice(first - y[0], end - y[0])
    _, rows, others = np.intersect1d(x, y, return_indices=True)
    return rows, others


def together(ledger: Ledger, attempt: int) -> Iterator[tuple[Life, Life, Rows, Rows]]:
    """Lives of an attempt that trained the same steps, two at a time, and their rows of these steps.

    Where all have trained together, it is enough to compare each with the one that wrote most: a rank that was killed
    may lack the last steps of the others.
    """
    lives, memberships = ledger.attempts[attempt], ledger.memberships(attempt)
    if not memberships.is_live:
        most = max(lives, key=lambda life: len(life.steps))
        yield from ((most, other, *aligned(most, other)) for other in lives if other is not most)
        return
    for one, other in _overlapping(lives):
        a, b = aligned(one, other)
        steps = one.steps.step[a]
        void = [step for step in (memberships.void(one), memberships.void(other)) if step is not None]
        inside = ~np.isin(steps, void)
        yield one, other, _numbers(a)[inside], _numbers(b)[inside]


def _overlapping(lives: Sequence[Life]) -> Iterator[tuple[Life, Life]]:
    """Two lives at a time that may have trained the same steps, each in the order in which they are given."""
    spans = [
        (int(life.steps.step.min()), int(life.steps.step.max()), i) for i, life in enumerate(lives) if len(life.steps)
    ]
    going_on: list[tuple[int, int]] = []  # the last steps of lives, and which they are
    for first, last, i in sorted(spans):
        going_on = [each for each in going_on if each[0] >= first]
        yield from ((lives[min(i, j)], lives[max(i, j)]) for _, j in going_on)
        going_on.append((last, i))


def _numbers(rows: Rows) -> NDArray[np.intp]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _divided(ledger: Ledger, attempt: int) -> Iterator[tuple[int, int, object]]:
    """The steps of an attempt from where it began, as far as they come out alike, and what they depend on."""
    lives = ledger.attempts[attempt]
    start = max((life.start for life in lives if life.recover and not ledger.has_joined(life)), default=0)
    for (first, what), (end, _) in pairwise([*ledger.memberships(attempt).parts(), (EVERY_STEP, None)]):
        if end > start:
            yield max(first, start), end, what


def _continued(worlds: Worlds, start: int, world: object) -> Worlds:
    """The numbers of ranks of a branch that goes back to a step and on with so many ranks."""
    shared = tuple(each for each in worlds if each[0] < start)
    return shared if shared and shared[-1][1] == world else (*shared, (start, world))


def _covering(parts: Sequence[StepRange], part: StepRange) -> list[StepRange]:
    """Parts that together hold every step that these do: those that a later one covers are not needed."""
    left = [each for each in parts if not (part.first <= each.first and part.end >= each.end)]
    return [*left, part] if len(part.life.steps) and part.first < part.end else list(parts)


def _compare_all(before: Sequence[StepRange], part: StepRange, found: Replays) -> set[int]:
    """Add what the steps of this part show that were trained before; which they were."""
    compared: set[int] = set()
    for earlier in before:
        first, end = max(earlier.first, part.first), min(earlier.end, part.end)
        if first < end:
            compared |= _compare(earlier.life, part.life, range(first, end), found)
    return compared


def _compare(earlier: Life, again: Life, within: range, found: Replays) -> set[int]:
    """Add what the steps that both trained have shown, those within this range; which they were."""
    a, b = aligned(earlier, again)
    steps = earlier.steps.step[a]
    inside = (steps >= within.start) & (steps < within.stop)
    if not inside.all():
        a, b = np.arange(len(earlier.steps))[a][inside], np.arange(len(again.steps))[b][inside]
        steps = steps[inside]
    one, two = earlier.steps.state[a], again.steps.state[b]
    untold = (one == 0) | (two == 0)
    states = ~untold & (one != two)
    with np.errstate(invalid="ignore"):
        losses = np.abs(earlier.steps.loss[a] - again.steps.loss[b]) > 0  # where both are noted
    for what, unlike in (("state", states), ("loss", losses)):
        if unlike.any():
            step = int(steps[unlike][0])
            found.unlike.append(Unlike(step, again.who, what, earlier.number or 0, again.number or 0))
    found.untold |= set(steps[untold].tolist())
    same = set(steps[~untold & ~states & ~losses].tolist())
    found.same |= same
    found.same_on_first |= same if again.rank == 0 else set()
    return set(steps.tolist())


def _untold(ledger: Ledger, attempt: int) -> str | None:
    """A step after which a rank does not tell its state, in an attempt in which it or another rank does so elsewhere.

    Where members were lost or joined, nothing but their states tells that those who went on had one: there all tell.
    """
    lives = ledger.attempts[attempt]
    blank = [life.steps.step[life.steps.shared == 0] for life in lives]
    lacking, number = sum(map(len, blank)), sum(len(life.steps) for life in lives)
    if lacking == number > 0 and ledger.memberships(attempt).is_live:
        return f"no rank tells its state after any step of attempt {attempt}, in which members were lost or joined"
    if lacking in (0, number):
        return None
    life, steps = next(each for each in zip(lives, blank, strict=True) if len(each[1]))
    others = "after other steps it does" if len(steps) < len(life.steps) else "other ranks do"
    return f"{life.who} does not tell its state after step {steps[0]} of attempt {attempt}, and {others}"


def _ranks_apart(ledger: Ledger, attempt: int) -> str | None:
    """A step after which the ranks had not all the same state, and the ranks that had another than most."""
    lives = [life for life in ledger.attempts[attempt] if len(life.steps)]
    first: int | None = None
    for mine, other, a, b in together(ledger, attempt):
        one, two = mine.steps.shared[a], other.steps.shared[b]
        unlike = np.flatnonzero((one != 0) & (two != 0) & (one != two))
        if len(unlike):
            step = int(mine.steps.step[a][unlike[0]])
            first = step if first is None else min(first, step)
    if first is None:
        return None
    states = {life.who: int(life.steps.shared[rows[0]]) for life in lives if len(rows := _rows(life, first))}
    (most, _), *_ = Counter(states.values()).most_common()
    others = [who for who, state in states.items() if state != most]
    at = Position(*divmod(first, ledger.geometry.steps_per_epoch))
    return f"{', '.join(others)} had another state than the other ranks after {at} (step {first}) of attempt {attempt}"


def _rows(life: Life, step: int) -> NDArray[np.intp]:
    return np.flatnonzero(life.steps.step == step)
