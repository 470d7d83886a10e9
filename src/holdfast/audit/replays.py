"""Whether steps that were trained again after a restore came out the same, and all ranks had the same state.

Steps are compared that were trained from the same past: sums over another number of ranks round otherwise, and so does
all that follows from them.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.audit.finding import Verdict, counted
from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.geometry import Position

# Numbers of ranks, each with the step from which on there were so many.
Worlds: TypeAlias = tuple[tuple[int, int], ...]
Rows: TypeAlias = "NDArray[np.intp] | slice"


class Unlike(NamedTuple):
    """A step that came out otherwise when it was trained again."""

    step: int
    who: str
    what: str
    first: int
    again: int


@dataclass(slots=True)
class Replays:
    """What comparing the steps that were trained again has shown."""

    same: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)  # a fingerprint is missing
    apart: set[int] = field(default_factory=set)  # trained by another number of ranks only
    unlike: list[Unlike] = field(default_factory=list)


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
        return "fail", f"{at} (step {step}) came out with another {what} in attempt {again} than in {first} ({who})"
    replayed = len(found.same | found.untold)
    left = f"; {counted(len(found.apart), 'step')} trained again by another number of ranks" if found.apart else ""
    if found.untold:
        return "unknown", f"{len(found.untold)} of {counted(replayed, 'replayed step')} without a fingerprint{left}"
    if not replayed:
        return "pass", f"no step was trained again by as many ranks{left}" if left else "no step was trained again"
    return "pass", f"{replayed} of {counted(replayed, 'replayed step')} came out the same{left}"


def replays(ledger: Ledger) -> Replays:
    """Every step that was trained again, compared with the first that was trained from the same past."""
    found = Replays()
    before: defaultdict[tuple[Worlds, int], list[Life]] = defaultdict(list)
    worlds: Worlds = ()
    reached = 0
    for number, lives in ledger.attempts.items():
        start = max((life.start for life in lives if life.recover), default=0)
        worlds = _continued(worlds, start, ledger.world(number)) if any(len(life.steps) for life in lives) else worlds
        compared: set[int] = set()
        for life in lives:
            for earlier in before[worlds, life.rank]:
                if earlier.reached > life.start and earlier.start < life.reached:
                    compared |= _compare(earlier, life, found)
            before[worlds, life.rank] = _covering(before[worlds, life.rank], life)
        steps = {step for life in lives for step in life.steps.step[life.steps.step < reached].tolist()}
        found.apart |= steps - compared
        reached = max([reached, *(life.reached for life in lives if len(life.steps))])
    return found


def aligned(a: Life, b: Life) -> tuple[Rows, Rows]:
    """The rows of two lives that are of the same steps."""
    x, y = a.steps.step, b.steps.step
    if len(x) and len(y) and a.steps.is_run and b.steps.is_run:
        first, end = max(x[0], y[0]), max(min(x[-1], y[-1]) + 1, max(x[0], y[0]))
        return slice(first - x[0], end - x[0]), slice(first - y[0], end - y[0])
    _, rows, others = np.intersect1d(x, y, return_indices=True)
    return rows, others


def _continued(worlds: Worlds, start: int, world: int) -> Worlds:
    """The numbers of ranks of a branch that goes back to a step and on with so many ranks."""
    shared = tuple(each for each in worlds if each[0] < start)
    return shared if shared and shared[-1][1] == world else (*shared, (start, world))


def _covering(lives: Sequence[Life], life: Life) -> list[Life]:
    """Lives that together hold every step that these do: those that a later one covers are not needed."""
    left = [each for each in lives if not (life.start <= each.start and life.reached >= each.reached)]
    return [*left, life] if len(life.steps) else list(lives)


def _compare(earlier: Life, again: Life, found: Replays) -> set[int]:
    """Add what the steps that both trained have shown; which they were."""
    a, b = aligned(earlier, again)
    steps = earlier.steps.step[a]
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
    found.same |= set(steps[~untold & ~states & ~losses].tolist())
    return set(steps.tolist())


def _ranks_apart(ledger: Ledger, attempt: int) -> str | None:
    """A step after which the ranks had not all the same state, and the ranks that had another than most."""
    lives = [life for life in ledger.attempts[attempt] if len(life.steps)]
    first: int | None = None
    for other in lives[1:]:
        a, b = aligned(lives[0], other)
        one, two = lives[0].steps.shared[a], other.steps.shared[b]
        unlike = np.flatnonzero((one != 0) & (two != 0) & (one != two))
        if len(unlike):
            step = int(lives[0].steps.step[a][unlike[0]])
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
