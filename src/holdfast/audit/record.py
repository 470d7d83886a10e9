"""Whether the record itself can be trusted: every line says what its kind must say, by somebody who can know it."""

from collections.abc import Sequence
from itertools import pairwise

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.audit.strikes import struck_otherwise
from holdfast.finding import SHOWN, Verdict, counted


def history_is_readable(ledger: Ledger) -> tuple[Verdict, str]:
    """Every event says what its kind must say, in the file of its writer.

    A torn line was promised to nobody: if a step is missing because of it, another check says so.
    """
    if wrong := ledger.malformed + ledger.strays:
        return "fail", f"{counted(len(wrong), 'line')} cannot be right: {_some(wrong)}"
    said = f"{counted(ledger.events, 'event')} of {counted(len(ledger.writers), 'writer')}"
    lines = [f"{each.path.name} line {each.line}, {each.size} bytes" for each in ledger.torn]
    left = f"; killed writers left {counted(len(lines), 'torn line')}: {'; '.join(lines)}" if lines else ""
    return ("pass" if ledger.events else "unknown"), said + left


def all_ranks_are_on_record(ledger: Ledger) -> tuple[Verdict, str]:
    """There is a history of every rank that trained something that counts."""
    if not ledger.attempts:
        return "unknown", "no rank is on record"
    for number, lives in ledger.attempts.items():
        counts = number in ledger.trained or any(life.ended for life in lives)
        if counts and (absent := ledger.absent(number)):
            world = ledger.world(number)
            return "unknown", (
                f"there is no history of {', '.join(absent)} of the {counted(world, 'rank')} of attempt {number}: "
                "bring those of all nodes together"
            )
    return "pass", f"the histories of {counted(len(ledger.lives), 'rank')}"


def every_life_is_an_attempt(ledger: Ledger) -> tuple[Verdict, str]:
    """Every start of a rank is an attempt of its own, and says what it is to do and what came back before it trains.

    It ends where a failure struck it on purpose.
    """
    if ledger.strangers:
        return "fail", _some(ledger.strangers)
    if not ledger.attempts:
        return "unknown", "no attempt is on record"
    for lives in ledger.lives.values():
        if because := _out_of_order(ledger, lives):
            return "fail", because
    for number, lives in ledger.attempts.items():
        if because := _disagreement(number, lives):
            return "fail", because
    if because := struck_otherwise(ledger):
        return "fail", because
    lives = [life for several in ledger.attempts.values() for life in several]
    if old := next((life for life in lives if life.version < 2), None):
        return "unknown", f"{old.who} wrote in version {old.version} of the format, which tells less"
    return "pass", f"{counted(len(lives), 'start')} of a rank in {counted(len(ledger.attempts), 'attempt')}"


def _out_of_order(ledger: Ledger, lives: Sequence[Life]) -> str | None:
    if wrong := next((life.wrong for life in lives if life.wrong), None):
        return wrong
    numbered = [life for life in lives if life.number is not None]
    for a, b in pairwise(numbered):
        again = not (ledger.has_joined(b) or ledger.never_joined(b))
        if (b.number or 0) < (a.number or 0) + again:
            return f"{b.who} started attempt {b.number} after attempt {a.number}: it lived twice under one number"
    return None


def _disagreement(number: int, lives: Sequence[Life]) -> str | None:
    first = next((life for life in lives if life.world is not None), None)
    for life in lives:
        if first and life.world not in (None, first.world):
            return f"attempt {number} had a world of {first.world} to {first.who} and of {life.world} to {life.who}"
        if life.world is not None and life.rank >= life.world:
            return f"{life.who} took part in attempt {number}, whose world has {counted(life.world, 'rank')}"
    return None


def _some(several: Sequence[str]) -> str:
    return "; ".join([*several[:SHOWN], *(["and more"] if len(several) > SHOWN else [])])
