"""Whether failures that were struck on purpose are those of the ranks: each is on record before it strikes."""

from collections import Counter

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.events import Strike
from holdfast.finding import counted

ENDS = ("exit", "kill")  # a process that was stopped may be woken by somebody, and a slow one goes on
STORAGE = "injected-storage"
TRAINING = ("boundary", "forward", "backward", "optimizer")  # points that a rank comes to one after the other


def struck_otherwise(ledger: Ledger) -> str | None:
    """A failure that cannot have struck where it is told to have, or whose rank went on."""
    return next(filter(None, (_impossible(ledger, *each) or _went_on(ledger, *each) for each in ledger.strikes)), None)


def struck_in(ledger: Ledger, attempt: int) -> str | None:
    """A failure that ended a worker in this attempt, as whoever struck it tells, if there was one."""
    for who, strike in ledger.strikes:
        if strike.attempt == attempt and strike.kind in ENDS and who != STORAGE:
            return f"{who} tells that rank {strike.rank} was to end in attempt {attempt} ({strike.kind})"
    return None


def ending(ledger: Ledger, attempt: int, rank: int) -> list[Strike]:
    """The failures that were to end a rank in this attempt, in the order in which they are told."""
    strikes = (strike for who, strike in ledger.strikes if who != STORAGE and strike.kind in ENDS)
    return [each for each in strikes if (each.attempt, each.rank) == (attempt, rank)]


def struck_more_often(ledger: Ledger, attempt: int, seen: Counter[int]) -> str | None:
    """A rank that was ended on purpose in this attempt more often than it was seen to fail.

    One that was to fall asleep is looked for no more. A save is written beside the training, so that two failures may
    strike at once.
    """
    slept = {member for each in ledger.memberships(attempt).regroups for member in each.asleep}
    for rank in sorted({strike.rank for _, strike in ledger.strikes} - slept):
        struck = [each for each in ending(ledger, attempt, rank) if each.point.partition("=")[0] in TRAINING]
        if len(struck) > seen[rank]:
            times = "once" if len(struck) == 1 else f"{len(struck)} times"
            return f"injected-{rank} tells that rank {rank} was to end {times} in attempt {attempt}"
    return None


def _impossible(ledger: Ledger, who: str, strike: Strike) -> str | None:
    """A rank, or an attempt, that never was. Rank 0 has every attempt on its disk before another rank takes part."""
    if who not in (STORAGE, f"injected-{strike.rank}"):
        return f"{who} tells of a failure of rank {strike.rank}"
    if strike.attempt not in ledger.attempts:
        there = "rank-0" in ledger.lives
        return f"{who} tells of a failure in attempt {strike.attempt}, of which no rank tells" if there else None
    if strike.rank >= (world := ledger.world(strike.attempt)):
        where = f"attempt {strike.attempt}, whose world has {counted(world, 'rank')}"
        return f"{who} tells of a failure of rank {strike.rank} in {where}"
    return None


def _went_on(ledger: Ledger, who: str, strike: Strike) -> str | None:
    """A rank that trained a window before which it was to end, or ended in order. Others may have taken its place.

    Only of a boundary is it known that it was in the window of the failure's step: at other points a failure strikes as
    soon as the script comes to one.
    """
    if strike.kind not in ENDS or strike.point != "boundary" or who == STORAGE:
        return None
    lives = [life for life in ledger.attempts.get(strike.attempt, ()) if life.rank == strike.rank]
    if not lives or any(life.reached <= strike.step and not life.ended for life in lives):
        return None
    where = f"before step {strike.step} of attempt {strike.attempt} ({strike.kind})"
    return f"{who} tells that rank {strike.rank} was to end {where}, and it {_told(lives[-1])}"


def _told(life: Life) -> str:
    if life.ended is None:
        return f"trained to step {life.reached}"
    return f"was {type(life.ended).__name__.lower()} at step {life.ended.step}"
