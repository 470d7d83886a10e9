"""What came out of the windows that members were lost in, beside what was declared of them.

A window that is declared skipped left the state as it was, and no optimizer stepped in it. One that is not has changed
it, unless the run often waits as long from one step of its optimizers to the next. And whose share is declared missing
did not come out of the window as the others did; who was lost with all sums of a window that was replayed did.
"""

from collections.abc import Iterator

import numpy as np

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.audit.memberships import Memberships
from holdfast.audit.step_columns import Numbers
from holdfast.audit.training import changed, state_after, states_before
from holdfast.finding import Verdict


def outcomes(ledger: Ledger, memberships: Memberships) -> Iterator[tuple[Verdict, str]]:
    """What speaks against the declarations of an attempt."""
    for life in ledger.attempts[memberships.number]:
        yield from _not_skipped(ledger, memberships, life)
        yield from _otherwise(ledger, memberships, life)
    yield from _came_to_nothing(ledger, memberships)


def _not_skipped(ledger: Ledger, memberships: Memberships, life: Life) -> Iterator[tuple[Verdict, str]]:
    """A window that is declared skipped, of whose one backward pass something came nevertheless."""
    if not memberships.skipped:
        return
    steps, reduced, before = life.steps, life.steps.reduced, states_before(ledger, life)
    for row in np.flatnonzero(np.isin(steps.step, list(memberships.skipped))).tolist():
        if memberships.void(life) == (step := int(steps.step[row])):
            continue
        name = f"step {step} of attempt {memberships.number} was declared skipped"
        several = row > 0 and min(reduced[row - 1], reduced[row]) > 1  # what an earlier pass came to, stays
        if steps.stepped[row]:
            yield "fail", f"{name}, and {life.who}'s optimizer stepped"
        elif not (before[row] and steps.shared[row]):
            yield "unknown", f"{name}, and {life.who} does not tell its state before and after it"
        elif before[row] != steps.shared[row] and not several:
            yield "fail", f"{name}, and changed {life.who}'s state"


def _otherwise(ledger: Ledger, memberships: Memberships, life: Life) -> Iterator[tuple[Verdict, str]]:
    """A lost member that tells of the window that the others finished without it, and not what follows from theirs.

    Whose share is declared missing may come out as they do by chance: coarse numbers move by little.
    """
    if (step := memberships.void(life)) is None:
        return
    rows = np.flatnonzero(life.steps.step == step)
    before, after = int(states_before(ledger, life)[rows[0]]), int(life.steps.shared[rows[0]])
    others = state_after(ledger, memberships.number, step)
    name = f"{life.who} came out of step {step}"
    if memberships.lacks(life.rank, step) and before and before != after == others:
        yield "unknown", f"{name} as the others did, who declare its samples missing (attempt {memberships.number})"
    if memberships.is_replayed(step) and after and others and after != others:
        yield "fail", f"{name} otherwise than the others, who replayed it (attempt {memberships.number})"


def _came_to_nothing(ledger: Ledger, memberships: Memberships) -> Iterator[tuple[Verdict, str]]:
    """A window that members were lost in, or just after, that changed nothing and is not declared skipped."""
    lossy = {step for each in memberships.lost for step in (each.step - 1, each.step)} - memberships.skipped
    if not lossy:
        return
    reported, moved = _moved(ledger, memberships)
    still = np.intersect1d(np.setdiff1d(reported, moved), list(lossy))
    if not len(still):
        return
    ends = np.concatenate([[reported[0] - 1], moved, [reported[-1] + 1]])
    waits, places = np.diff(ends), np.searchsorted(moved, still)
    longest = int(np.delete(waits, [*places, len(moved)]).max(initial=1))  # the last may go on after the attempt
    for step, wait in zip(still.tolist(), waits[places].tolist(), strict=True):
        if wait > longest:
            yield (
                "unknown",
                f"step {step} of attempt {memberships.number}, around which members were lost, changed nothing, and is "
                "not declared skipped",
            )


def _moved(ledger: Ledger, memberships: Memberships) -> tuple[Numbers, Numbers]:
    """The windows of an attempt that were reported, and those that came to something or are known not to have."""
    reported: list[Numbers] = []
    moved: list[Numbers] = [np.array(sorted(memberships.skipped), np.int64)]
    for life in ledger.attempts[memberships.number]:
        steps = life.steps.step
        void = memberships.void(life)
        counts = (steps < ledger.geometry.steps) & (steps != (-1 if void is None else void))
        reported.append(steps[counts])
        moved.append(steps[counts & (life.steps.stepped | changed(ledger, life))])
    there = np.unique(np.concatenate(reported))
    return there, np.intersect1d(there, np.concatenate(moved))
