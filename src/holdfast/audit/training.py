"""Whether windows were trained, and not only handed out."""

import numpy as np
from numpy.typing import NDArray

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.audit.replays import together
from holdfast.audit.step_columns import Numbers, shared_part
from holdfast.finding import Verdict, counted
from holdfast.sampler.plan import Position


def every_window_was_trained(ledger: Ledger) -> tuple[Verdict, str]:
    """In every window a backward pass was summed or held back, an optimizer stepped, or the state changed."""
    geometry = ledger.geometry
    told, untold = 0, 0
    for number in ledger.trained:
        for life in ledger.attempts[number]:
            trained, idle = _trained(ledger, life)
            if idle.any():
                step = int(life.steps.step[ledger.kept(life)][idle][0])
                at = Position(*divmod(step, geometry.steps_per_epoch))
                return "fail", (
                    f"{at} (step {step}) was handed out to {life.who} in attempt {number} and not "
                    f"trained: no backward pass, no step of an optimizer, and the state is as it was ({idle.sum()} such)"
                )
            told, untold = told + int(trained.sum()), untold + int((~trained).sum())
        if because := _summed_apart(ledger, number):
            return "fail", because
    if because := _never_stepped(ledger) or _never_summed(ledger):
        return "fail", because
    if untold or not told:
        of = counted(untold, "share")
        return "unknown", f"whether {of} of a window {'was' if untold == 1 else 'were'} trained is not on record"
    return (
        "pass",
        f"{counted(told, 'share')} of windows trained: gradients summed, optimizers stepped, or states changed",
    )


def _trained(ledger: Ledger, life: Life) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which of the steps of a life were trained, and which were not, as far as either is known and as they are kept."""
    worked, state, before = life.steps.worked, life.steps.shared, states_before(ledger, life)
    known = (state != 0) & (before != 0)
    kept = ledger.kept(life)
    skipped = ledger.memberships(life.number or 0).skipped
    if skipped:  # a window whose samples are declared missing is not trained, and no claim says that it was
        worked = worked | np.isin(life.steps.step, list(skipped))
    return (worked | changed(ledger, life))[kept], (~worked & known & (state == before))[kept]


def changed(ledger: Ledger, life: Life) -> NDArray[np.bool_]:
    """Which of the steps of a life are known to have changed what all ranks share."""
    state, before = life.steps.shared, states_before(ledger, life)
    found: NDArray[np.bool_] = (state != 0) & (before != 0) & (state != before)
    return found


def states_before(ledger: Ledger, life: Life) -> Numbers:
    """The fingerprint of what all ranks shared before each step of a life; 0 where nobody says."""
    state = life.steps.shared
    before: Numbers = np.concatenate([[_began_with(ledger, life)], state[:-1]])[: len(state)]
    return before


def _began_with(ledger: Ledger, life: Life) -> int:
    """What a life began with, as it says itself, or whoever trained the step before; 0 if nobody does."""
    if life.recover and life.recover.fingerprint:
        return shared_part(life.recover.fingerprint)
    trainer = ledger.lineage.trainer(life.start - 1) if life.start else None
    return state_after(ledger, trainer, life.start - 1) if trainer is not None else 0


def state_after(ledger: Ledger, attempt: int, step: int) -> int:
    """The fingerprint of what all ranks shared after a step of an attempt; 0 if nobody says."""
    for life in ledger.attempts.get(attempt, ()):
        rows = np.flatnonzero(life.steps.step == step)
        if len(rows) and not is_void(ledger, life, step):
            return int(life.steps.shared[rows[0]])
    return 0


def is_void(ledger: Ledger, life: Life, step: int) -> bool:
    """Whether a lost member reported a step that the others finished without it."""
    return bool(ledger.live) and life.number is not None and ledger.memberships(life.number).void(life) == step


def _never_stepped(ledger: Ledger) -> str | None:
    """A run whose gradients never went anywhere: no optimizer stepped, and the first state is still the last.

    Windows that are declared skipped do not count: nothing was to come of them.
    """
    lives = [(life, ledger.kept(life)) for number in ledger.trained for life in ledger.attempts[number]]
    states = {int(state) for life, kept in lives for state in np.unique(life.steps.shared[kept])}
    windows = sum(
        len(np.setdiff1d(steps, list(ledger.memberships(number).skipped))) for number, steps in ledger.trained.items()
    )
    if windows < 2 or len(states) != 1 or 0 in states or any(life.steps.stepped[kept].any() for life, kept in lives):
        return None
    return f"in {windows} windows no optimizer stepped, and the state is as it was"


def _never_summed(ledger: Ledger) -> str | None:
    """Several ranks of which each kept its gradients to itself, in every window of the run."""
    lives = [(life, ledger.kept(life)) for number in ledger.trained for life in ledger.attempts[number]]
    alone = min((ledger.world(number) for number in ledger.trained), default=1) == 1
    held = any(life.steps.passed[kept].any() for life, kept in lives)
    if alone or not held or any(life.steps.reduced[kept].any() for life, kept in lives):
        return None
    return "ranks held their gradients back in every window, and never summed them"


def _summed_apart(ledger: Ledger, attempt: int) -> str | None:
    """Ranks that do not agree on how many sums they took part in, though a sum takes all of them."""
    for first, other, a, b in together(ledger, attempt):
        if len(unlike := np.flatnonzero(first.steps.stepped[a] != other.steps.stepped[b])):
            step = int(first.steps.step[a][unlike[0]])
            return f"of {first.who} and {other.who} only one's optimizer stepped in step {step} of attempt {attempt}"
        unlike = np.flatnonzero(first.steps.reduced[a] != other.steps.reduced[b])
        if len(unlike):
            step = int(first.steps.step[a][unlike[0]])
            sums = f"{first.steps.reduced[a][unlike[0]]} and {other.steps.reduced[b][unlike[0]]}"
            return f"{first.who} and {other.who} summed {sums} backward passes in step {step} of attempt {attempt}"
    return None
