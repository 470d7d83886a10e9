"""Whether those whom a supervisor saw die were lost where they died, as the others declare.

A worker writes down which window it trains at every boundary, where its supervisor reads it once the worker is dead: so
that is exact, but for one that fell asleep and was woken, of which it may be the window before its sleep. A sum of
gradients takes all members. So whoever died in a window has no part in any sum after it, nor in all sums of that window
if it was struck within, before it had given its last gradients; and the others lack it from the first of those on.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.audit.declared import LostMember
from holdfast.audit.ledger import Ledger
from holdfast.audit.seen import placed
from holdfast.audit.step_columns import Numbers
from holdfast.audit.strikes import ending
from holdfast.audit.supervision import Supervision
from holdfast.events import Detect, Strike


class SeenDeath(NamedTuple):
    """A worker that a supervisor saw dead, the attempt and the window that it died in, and what struck it within that."""

    who: str
    number: int
    rank: int
    step: int
    strike: Strike | None

    def __str__(self) -> str:
        struck = f" ({self.strike.kind} at {self.strike.point})" if self.strike else ""
        return f"{self.who} saw rank {self.rank} fail in step {self.step} of attempt {self.number}{struck}"


def undeclared_death(ledger: Ledger) -> str | None:
    """A worker that died, and was not declared lost by those who went on, or elsewhere than where it died."""
    deaths: defaultdict[tuple[int, int], list[SeenDeath]] = defaultdict(list)
    for death in _deaths(ledger):
        deaths[death.number, death.rank].append(death)
    for (number, rank), several in deaths.items():
        memberships = ledger.memberships(number)
        losses = [each for each in memberships.lost if each.member == rank]
        if because := _unmatched(several, losses, memberships.summed):
            return because
    return None


def recovers_live(ledger: Ledger, number: int) -> bool:
    """Whether others were to go on without those who fail in an attempt, by what the run says or by what they did."""
    return ledger.recovery not in (None, "restart") or ledger.memberships(number).is_live


def _deaths(ledger: Ledger) -> Iterator[SeenDeath]:
    """Of one supervisor alone: who was dead when it was looked at, in the order in which they were seen."""
    if not all(each.is_alone for each in ledger.supervisions):
        return
    slept = {(each.number, regroup.step) for each in ledger.live for regroup in each.regroups if regroup.asleep}
    for supervision, detect, number in placed(ledger):
        step = detect.step or 0
        if detect.exit is None or number not in ledger.attempts or not recovers_live(ledger, number):
            continue
        if (number, step + 1) not in slept:
            strike = _within(ledger, supervision, detect, number)
            yield SeenDeath(supervision.who, number, detect.rank, step, strike)


def _within(ledger: Ledger, supervision: Supervision, detect: Detect, number: int) -> Strike | None:
    """What struck a worker in the window it died in, before it had given all its gradients of that."""
    for strike in ending(ledger, number, detect.rank):
        ends = detect.signal == "SIGKILL" if strike.kind == "kill" else detect.exit == 137
        if ends and strike.step == detect.step and _is_early(strike.point):
            alike = (each for each in supervision.detects if each[:2] == detect[:2] and each.step == detect.step)
            return strike if len([*alike]) == 1 else None  # else another of them may be the one
    return None


def _is_early(point: str) -> bool:
    """Whether a rank that is struck at this point has yet to give gradients of its window."""
    word, _, part = point.partition("=")
    try:
        return word == "forward" or (word == "backward" and round(float(part), 6) < 1)
    except ValueError:
        return False


def _unmatched(deaths: Sequence[SeenDeath], losses: Sequence[LostMember], summed: Numbers) -> str | None:
    """The first of a member's deaths that is none of its losses, though the others went on; both are in order.

    There may be more losses: of those who were let in and died before they began a window.
    """
    left = iter(losses)
    for death in deaths:
        fits = any(_misfit(death, loss, summed) is None for loss in left)
        if not fits and len(summed) and summed[-1] > death.step:
            after = (loss for loss in losses if not _between(summed, loss.step, death.step))
            why = next(filter(None, (_misfit(death, loss, summed) for loss in after)), None)
            return f"{death}, and {why or 'no regroup tells that the others went on without it'}"
    return None


def _misfit(death: SeenDeath, loss: LostMember, summed: Numbers) -> str | None:
    """Why this loss is not the one of this death."""
    life = loss.life
    began = life is not None and life.start < death.step  # one that joins within its window may be given sums
    last = death.step - (death.strike is not None and began)  # the last window that it can have a part in all sums of
    if _between(summed, loss.step, death.step):
        return f"was lost before, in step {loss.step}"
    if len(later := _between(summed, last, loss.step)):
        return f"the others declare that it was lost in step {loss.step}, and that step {later[0]} was summed with it"
    if loss.complete and loss.step > last:
        return f"the others declare that they kept all sums of step {loss.step}, with its gradients"
    if life is not None and life.steps.last is not None and life.steps.last > last:
        return f"{life.who} tells that it trained step {life.steps.last}"
    return None


def _between(summed: Numbers, after: int, before: int) -> list[int]:
    """The windows after one and before another in which gradients were summed."""
    return summed[np.searchsorted(summed, after, side="right") : np.searchsorted(summed, before)].tolist()  # type: ignore[no-any-return]
