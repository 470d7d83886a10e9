"""Whether what supervisors say of a run can be, and is what its ranks say."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePath

from holdfast.arguments import changes
from holdfast.audit.ends import is_finished
from holdfast.audit.finding import CannotTell, Verdict, counted
from holdfast.audit.ledger import Ledger
from holdfast.audit.supervision import Supervision
from holdfast.events import Done, Judged, Preempted, Stopped

WORDS = ("completed", "gave-up", "preempted", "refused", "script-error")


def supervisors_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """What supervisors say of the run, of its end and of how often it was started, can be, and is what the ranks say."""
    if because := next(filter(None, (_other_world(ledger, each) for each in ledger.supervisions)), None):
        return "fail", because
    judged = [(each, verdict) for each in ledger.supervisions for verdict in each.verdicts]
    for supervision, verdict in judged:
        because = _miscounted(supervision, verdict) or (
            _not_completed(ledger, supervision, verdict)
            if verdict.verdict == "completed"
            else _completed(ledger, supervision, verdict)
        )
        if because:
            return "fail", f"{supervision.who} says {verdict.verdict!r:.20}, and {because}"
    if because := _cannot_be(ledger) or _another_command(ledger) or _undeclared(ledger):
        return "fail", because
    _require_every_start(ledger)
    _require_every_failure(ledger)
    last = {each.who: verdict.verdict for each, verdict in judged}
    return "pass", ", ".join(
        f"{who} says {word!r}" for who, word in last.items()
    ) if last else "no supervisor has judged"


def _cannot_be(ledger: Ledger) -> str | None:
    """What no supervisor does: in one life, or from one to the next."""
    if wrong := next((each.wrong for each in ledger.supervisions if each.wrong), None):
        return wrong
    for before, after in _successions(ledger):
        if after.launches[0] <= before.launches[-1]:
            return f"{after.who} launched attempt {after.launches[0]} after it had started {before.launches[-1]}"
    return None


def _another_command(ledger: Ledger) -> str | None:
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


def _undeclared(ledger: Ledger) -> str | None:
    """A plan that extends the run, where all supervisors have told what they launched and none that it does so."""
    if not ledger.supervisions or any(not each.launches for each in ledger.supervisions):
        return None
    life = next((life for life, plan in ledger.plans if plan.extends), None)
    if life and not any(each.extends for each in ledger.supervisions):
        return (
            f"{life.who} extends the run in attempt {life.number}, and no supervisor tells that it was to be extended"
        )
    return None


def _require_every_start(ledger: Ledger) -> None:
    """Some supervisor has started every attempt, if there are supervisors.

    One that was killed may not have written down its last start. Who goes on with other nodes counts anew.
    """
    names = {each.who for each in ledger.supervisions}
    if not names or ("supervisor" in names and len(names) > 1):
        return
    for before, after in _successions(ledger):
        if before.is_alone and after.launches[0] > before.launches[-1] + 1:
            raise CannotTell(
                f"no supervisor tells of attempt {before.launches[-1] + 1}, which came before {after.launches[0]}"
            )
    starts = {number for each in ledger.supervisions for number in each.launches}
    was_killed = any(not each.verdicts for each in ledger.supervisions)
    for number in ledger.attempts:
        if number not in starts and not (was_killed and number > max(starts, default=0)):
            raise CannotTell(f"no supervisor tells that it started attempt {number}: is a part of its history missing?")


def _require_every_failure(ledger: Ledger) -> None:
    """Who starts workers again has seen one fail that the others did not survive; and each that they did survive.

    One that was killed may not have written down what it saw last.
    """
    for each in ledger.supervisions:
        for number in each.launches if each.verdicts else each.launches[:-1]:
            meant = [ranks for ranks in _meant(ledger, each, number) if ranks in ledger.attempts]
            if meant and number != each.launches[-1] and not any(_fatal(ledger, each, number, of) for of in meant):
                raise CannotTell(
                    f"{each.who} started again after attempt {number}, and others survived all it saw fail"
                )
            unseen = [_survived(ledger, of) - Counter(each.failed.get(number, ())) for of in meant]
            if unseen and each.is_alone and all(unseen):
                raise CannotTell(f"{each.who} does not tell that rank {min(unseen[0])} failed in attempt {number}")


def _successions(ledger: Ledger) -> Iterator[tuple[Supervision, Supervision]]:
    """The lives of each supervisor that started anything, each with the next."""
    lives: defaultdict[str, list[Supervision]] = defaultdict(list)
    for each in ledger.supervisions:
        if each.launches:
            lives[each.who].append(each)
    return (pair for several in lives.values() for pair in pairwise(several))


def _command(argv: Sequence[str]) -> tuple[str, ...]:
    return (PurePath(argv[0]).name, *argv[1:]) if argv else ()


def _shown(argv: Sequence[str]) -> str:
    return repr(" ".join(_command(argv)))


def _other_world(ledger: Ledger, supervision: Supervision) -> str | None:
    """An attempt that a lone supervisor started with another number of workers than there were ranks."""
    if _last_start(ledger) < max(ledger.attempts, default=0):
        return None  # it is behind in its count, so its numbers are of other attempts
    for number, workers in supervision.workers.items():
        if number in ledger.attempts and ledger.attempts[number] and ledger.world(number) != workers:
            ranks = counted(ledger.world(number), "rank")
            return f"{supervision.who} started {counted(workers, 'worker')} in attempt {number}, which had {ranks}"
    return None


def _meant(ledger: Ledger, supervision: Supervision, number: int) -> Sequence[int]:
    """The attempts of ranks that a supervisor may mean by a number.

    A supervisor that was killed before it could write down a start is behind in its count ever after: not before that,
    and at last by as much as ranks tell of more attempts.
    """
    behind = max(0, max(ledger.attempts, default=0) - max(_last_start(ledger), number))
    lives = [each for each in ledger.supervisions if each.who == supervision.who]
    place = next(i for i, each in enumerate(lives) if each is supervision)
    least = behind if supervision is lives[-1] and supervision.verdicts else 0
    most = behind if least or any(not each.verdicts for each in lives[:place]) else 0
    return range(number + least, number + most + 1)


def _last_start(ledger: Ledger) -> int:
    return max((number for each in ledger.supervisions for number in each.launches), default=0)


def _miscounted(supervision: Supervision, verdict: Judged) -> str | None:
    if verdict.verdict not in WORDS:
        return "that is no verdict"
    if len(supervision.verdicts) > 1:
        return "judged more than once"
    started = max(supervision.launches, default=None)
    # A start that failed before there were workers is counted, and not written down.
    most = 0 if verdict.verdict == "completed" else 1
    if started is not None and not started <= verdict.attempts <= started + most:
        return f"counts {counted(verdict.attempts, 'attempt')}, where it started attempt {started} last"
    return None


def _not_completed(ledger: Ledger, supervision: Supervision, verdict: Judged) -> str | None:
    """What speaks against a run that is said to be completed. A script may leave its loop: then no rank is done."""
    meant = _meant(ledger, supervision, verdict.attempts)
    against = [_failed_in(ledger, supervision, verdict.attempts, number) for number in meant]
    if all(against):
        return against[0]
    against = [_not_done(ledger, number) for number in ledger.attempts if number in meant]
    return next(iter(against), None) if all(against) else None


def _failed_in(ledger: Ledger, supervision: Supervision, counted: int, number: int) -> str | None:
    """A worker that failed in an attempt, and without which the others did not go on.

    One that was to take the place of a lost one may fail before it does: then that rank fails once more than it is lost.
    """
    survived = _survived(ledger, number)
    if any(rank not in survived for rank in _fatal(ledger, supervision, counted, number)):
        return f"saw a worker fail in attempt {counted}"
    return None


def _fatal(ledger: Ledger, supervision: Supervision, counted: int, number: int) -> Counter[int]:
    """Who failed in an attempt, as its supervisor counts it, and how often the others, as they do, did not go on."""
    return Counter(supervision.failed.get(counted, ())) - _survived(ledger, number)


def _survived(ledger: Ledger, number: int) -> Counter[int]:
    return next((each.survived for each in ledger.live if each.number == number), Counter())


def _not_done(ledger: Ledger, number: int) -> str | None:
    """What speaks against an attempt that is said to have been the last."""
    lives = ledger.attempts[number]
    if stopped := [life.who for life in lives if isinstance(life.ended, Preempted)]:
        return f"{stopped[0]} was preempted in attempt {number}"
    done = [life.rank for life in lives if isinstance(life.ended, Done | Stopped)]
    if done and not is_finished(ledger, number):
        if absent := ledger.absent(number):
            raise CannotTell(f"there is no history of {', '.join(absent)}")
        silent = next(rank for rank in ledger.memberships(number).members if rank not in done)
        return f"rank-{silent} never said that it was done in attempt {number}"
    return None


def _completed(ledger: Ledger, supervision: Supervision, verdict: Judged) -> str | None:
    """An attempt that went well to its end though the run is said to have ended otherwise."""
    number, meant = verdict.attempts, _meant(ledger, supervision, verdict.attempts)
    if len(meant) > 1 or not is_finished(ledger, meant[0]):
        return None
    if any(number in each.asked or _fatal(ledger, each, number, meant[0]) for each in ledger.supervisions):
        return None
    return f"all ranks were done in attempt {meant[0]}, of which {supervision.who} saw no failure"
