"""Whether what supervisors say of a run can be, and is what its ranks say."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from holdfast.audit.commands import another_command, changed, given_otherwise, undeclared
from holdfast.audit.deaths import undeclared_death
from holdfast.audit.judgements import failed_elsewhere, misjudged
from holdfast.audit.ledger import Ledger
from holdfast.audit.seen import counts_alike, fatal, last_start, meant, placed, survived
from holdfast.audit.supervision import Supervision
from holdfast.finding import CannotTell, Verdict, counted

UNWRITTEN = (
    1024  # steps that a rank may have trained and not written down when it was killed: those of a tenth of a second
)


def supervisors_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """What supervisors say of the run, of its end and of how often it was started, can be, and is what the ranks say."""
    for each in ledger.supervisions:
        if because := _other_world(ledger, each) or _other_rank(ledger, each):
            return "fail", because
    judged = [(each, verdict) for each in ledger.supervisions for verdict in each.verdicts]
    if because := next(filter(None, (misjudged(ledger, each, verdict) for each, verdict in judged)), None):
        return "fail", because
    commands = (another_command, undeclared, given_otherwise)
    for check in (_cannot_be, *commands, failed_elsewhere, undeclared_death, _other_snapshot, _later_snapshot):
        if because := check(ledger):
            return "fail", because
    _require_every_start(ledger)
    _require_every_failure(ledger)
    _require_what_was_seen(ledger)
    last = {each.who: verdict.verdict for each, verdict in judged}
    said = ", ".join(f"{who} says {word!r}" for who, word in last.items()) or "no supervisor has judged"
    return "pass", f"{said}{changed(ledger)}"


def _cannot_be(ledger: Ledger) -> str | None:
    """What no supervisor does: in one life, or from one to the next."""
    if wrong := next((each.wrong for each in ledger.supervisions if each.wrong), None):
        return wrong
    for before, after in _successions(ledger):
        if after.launches[0] <= before.launches[-1]:
            return f"{after.who} launched attempt {after.launches[0]} after it had started {before.launches[-1]}"
    return None


def _require_every_start(ledger: Ledger) -> None:
    """Some supervisor has started every attempt, if there are supervisors.

    One that was killed may not have written down its last start. Who goes on with other nodes counts anew.
    """
    names = {each.who for each in ledger.supervisions}
    if not names and ledger.argv is not None and ledger.attempts:
        raise CannotTell("run.json is that of a supervised run, and there is no history of its supervisor")
    if not names or ("supervisor" in names and len(names) > 1):
        return
    for before, after in _successions(ledger):
        if before.is_alone and after.launches[0] > before.launches[-1] + 1:
            raise CannotTell(
                f"no supervisor tells of attempt {before.launches[-1] + 1}, which came before {after.launches[0]}"
            )
    starts = {number for each in ledger.supervisions for number in each.launches}
    unwritten = sum(each.may_have_started_more for each in ledger.supervisions)
    for number in ledger.attempts:
        if number not in starts and not 0 < number - max(starts, default=0) <= unwritten:
            raise CannotTell(f"no supervisor tells that it started attempt {number}: is a part of its history missing?")


def _require_what_was_seen(ledger: Ledger) -> None:
    """Who was seen to train by a supervisor tells of it, but for its last steps."""
    for supervision, detect, number in placed(ledger):
        who, step = f"rank-{detect.rank}", detect.step or 0
        if who not in ledger.lives:
            continue
        reached = [life.reached for life in ledger.attempts.get(number, ()) if life.rank == detect.rank]
        if not reached or step > max(reached) + UNWRITTEN:
            tells = f"of which {who} tells nothing" if not reached else f"where {who} tells of step {max(reached)} last"
            raise CannotTell(
                f"{supervision.who} saw rank {detect.rank} fail in step {step} of attempt {number}, {tells}"
            )


def _require_every_failure(ledger: Ledger) -> None:
    """Who starts workers again has seen one fail that the others did not survive; and each that they did survive.

    One that was killed may not have written down what it saw last.
    """
    for each in ledger.supervisions:
        for number in each.launches if each.verdicts else each.launches[:-1]:
            possible = meant(ledger, each, number)
            several = [ranks for ranks in possible if ranks in ledger.attempts]
            if several and number != each.launches[-1] and not any(fatal(ledger, each, number, of) for of in several):
                raise CannotTell(
                    f"{each.who} started again after attempt {number}, and others survived all it saw fail"
                )
            # Of an attempt that no rank tells of, all died before they could: nobody survived anything in it.
            unseen = [survived(ledger, of) - Counter(each.failed.get(number, ())) for of in possible]
            if unseen and each.is_alone and all(unseen):
                raise CannotTell(f"{each.who} does not tell that rank {min(unseen[0])} failed in attempt {number}")


def _other_snapshot(ledger: Ledger) -> str | None:
    """A snapshot that a lone supervisor saw when it started again, and that neither came back nor was passed over.

    It may have seen less than there was in the end. A snapshot that was passed over need not be on record otherwise: who
    saved it may have been killed before it could say so.
    """
    if not counts_alike(ledger):
        return None
    restores = {restore.recover.attempt: restore for restore in reversed(ledger.restores)}
    for each in ledger.supervisions:
        for number, newest in each.newest.items() if each.is_alone else ():
            saw = f"{each.who} saw the snapshot of step {newest} when it started attempt {number}"
            if ledger.plans and newest > ledger.geometry.steps:
                return f"{saw}, in a run of {ledger.geometry.steps} steps"
            restore = restores.get(number)
            if restore and (restore.recover.restored or 0) < newest and not restore.passed_over(newest):
                return f"{saw}, and {restore} and does not say that it passed it over"
    return None


def _later_snapshot(ledger: Ledger) -> str | None:
    """A snapshot that came back, and was not there when a lone supervisor looked, after it had ended all its workers.

    It ends them once a worker of its own has failed, before it looks; where it finds otherwise that they cannot go on,
    it looks first. Only in the run's own folder it is certain that nothing is written for the dead: an object store may
    finish what they had sent.
    """
    if not counts_alike(ledger) or not ledger.at_home:
        return None
    restores = {restore.recover.attempt: restore for restore in reversed(ledger.restores)}
    for each in ledger.supervisions:
        last = {detect.attempt: detect.rank for detect in each.detects}
        for number, newest in each.newest.items() if each.is_alone else ():
            restore = restores.get(number)
            if restore and (restore.recover.restored or 0) > newest and last.get(number - 1, -1) >= 0:
                saw = f"the snapshot of step {newest} was the newest when {each.who} started attempt {number}"
                return f"{saw}, and {restore}"
    return None


def _successions(ledger: Ledger) -> Iterator[tuple[Supervision, Supervision]]:
    """The lives of each supervisor that started anything, each with the next."""
    lives: defaultdict[str, list[Supervision]] = defaultdict(list)
    for each in ledger.supervisions:
        if each.launches:
            lives[each.who].append(each)
    return (pair for several in lives.values() for pair in pairwise(several))


def _other_world(ledger: Ledger, supervision: Supervision) -> str | None:
    """An attempt that a lone supervisor started with another number of workers than there were ranks."""
    if last_start(ledger) < max(ledger.attempts, default=0):
        return None  # it is behind in its count, so its numbers are of other attempts
    for number, workers in supervision.workers.items():
        if number in ledger.attempts and ledger.attempts[number] and ledger.world(number) != workers:
            ranks = counted(ledger.world(number), "rank")
            return f"{supervision.who} started {counted(workers, 'worker')} in attempt {number}, which had {ranks}"
    return None


def _other_rank(ledger: Ledger, supervision: Supervision) -> str | None:
    """A failure of a rank that a lone supervisor did not start. Where a run recovers live, others wait in reserve."""
    for detect in supervision.detects if ledger.recovery == "restart" else ():
        workers = supervision.workers.get(detect.attempt)
        if workers is not None and detect.rank >= workers:
            saw = f"{supervision.who} saw rank {detect.rank} fail in attempt {detect.attempt}"
            return f"{saw}, in which it started {counted(workers, 'worker')}"
    return None
