"""Whether the script was given what the run says: by its supervisors, by its folder, and by what its ranks were given."""

import json
from collections.abc import Sequence
from pathlib import PurePath

import xxhash

from holdfast.audit.ledger import Ledger
from holdfast.audit.seen import last_start
from holdfast.runs.arguments import changes


def another_command(ledger: Ledger) -> str | None:
    """A command that is not the run's; where its script lies may differ, from node to node.

    Of its arguments those may differ from the command before that a launch declares to be changed.
    """
    before: Sequence[str] | None = None
    for each in ledger.supervisions:
        if each.argv is None:
            continue
        if before is not None and _command(each.argv) != _command(before):
            told = {change.name for change in changes(before[1:], each.argv[1:])}
            if _command(each.argv)[:1] != _command(before)[:1] or told != {*each.changed}:
                return f"{each.who} launched {_shown(each.argv)}, and the run is {_shown(before)}"
        before = each.argv
    launched = ledger.supervisions and ledger.supervisions[-1].argv is not None  # else it ended before it could
    if launched and before is not None and ledger.argv is not None and _command(before) != _command(ledger.argv):
        return f"the last command was {_shown(before)}, and the run is {_shown(ledger.argv)}"
    return None


def undeclared(ledger: Ledger) -> str | None:
    """A plan that extends the run, where all supervisors have told what they launched and none that it does so."""
    if not ledger.supervisions or any(not each.launches for each in ledger.supervisions):
        return None
    life = next((life for life, plan in ledger.plans if plan.extends), None)
    if life and not any(each.extends for each in ledger.supervisions):
        return (
            f"{life.who} extends the run in attempt {life.number}, and no supervisor tells that it was to be extended"
        )
    return None


def _command(argv: Sequence[str]) -> tuple[str, ...]:
    return (PurePath(argv[0]).name, *argv[1:]) if argv else ()


def _shown(argv: Sequence[str]) -> str:
    return repr(" ".join(_command(argv)))


def given_otherwise(ledger: Ledger) -> str | None:
    """A rank whose script was given other arguments than its supervisor tells.

    Nothing is said where a supervisor was killed before it could tell what it launched.
    """
    if not ledger.supervisions or any(not each.argv for each in ledger.supervisions):
        return None
    launched = {_digest(each.argv or ()) for each in ledger.supervisions}
    counts = last_start(ledger) >= max(ledger.attempts, default=0)
    started = {number: each for each in ledger.supervisions for number in each.launches if each.is_alone and counts}
    for life, plan in ledger.plans:
        if plan.command is None:
            continue
        if plan.command not in launched:
            than = "than any supervisor launched the script with"
            return f"{life.who} was given other arguments in attempt {life.number} {than}"
        mine = started.get(life.number or 0)
        if mine and plan.command != _digest(mine.argv or ()):
            return f"{life.who} was not given in attempt {life.number} what {mine.who} launched the script with"
    return None


def changed(ledger: Ledger) -> str:
    """Which arguments of the script differ from those before by declaration, and since when, as a part of a sentence."""
    told = {(each.launches[0], tuple(each.changed)): None for each in ledger.supervisions if each.changed}
    return "".join(
        f"; {', '.join(names)} {'was' if len(names) == 1 else 'were'} changed in attempt {number}, by declaration"
        for number, names in told
    )


def _digest(argv: Sequence[str]) -> str:
    """What a rank says of what its script was given."""
    return xxhash.xxh3_64_hexdigest(json.dumps(argv[1:]).encode())
