"""Whether the verdicts of supervisors are what the ranks of the run say of its end."""

from collections import Counter
from collections.abc import Sequence

from holdfast.audit.deaths import recovers_live
from holdfast.audit.ledger import Ledger
from holdfast.audit.plan import is_finished
from holdfast.audit.seen import fatal, meant, placed, survived
from holdfast.audit.strikes import struck_in, struck_more_often
from holdfast.audit.supervision import Supervision
from holdfast.events import SECOND_SIGNAL, SUPERVISED_ONLY, Done, Judged, Preempted, Stopped
from holdfast.finding import CannotTell, counted

WORDS = ("completed", "gave-up", "preempted", "refused", "script-error")


def misjudged(ledger: Ledger, supervision: Supervision, verdict: Judged) -> str | None:
    """What speaks against a verdict."""
    because = _miscounted(supervision, verdict) or (
        _not_completed(ledger, supervision, verdict)
        if verdict.verdict == "completed"
        else _completed(ledger, supervision, verdict)
    )
    return f"{supervision.who} says {verdict.verdict!r:.20}, and {because}" if because else None


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
    several = meant(ledger, supervision, verdict.attempts)
    against = [_failed_in(ledger, supervision, verdict.attempts, number) for number in several]
    if all(against):
        return against[0]
    if because := _untold(ledger, several, verdict) or _unseen(ledger, several, verdict):
        return because
    against = [_not_done(ledger, number) for number in ledger.attempts if number in several]
    return next(iter(against), None) if all(against) else None


def _untold(ledger: Ledger, several: Sequence[int], verdict: Judged) -> str | None:
    """An attempt that is said to be completed, and of which no rank tells. A script need not come to its loop."""
    if not ledger.has_begun or any(number in ledger.attempts for number in several):
        return None
    why = f"no rank tells of attempt {several[0]}"
    if SUPERVISED_ONLY in verdict.because:
        raise CannotTell(f"{why}, which was supervised only")
    return why


def _unseen(ledger: Ledger, several: Sequence[int], verdict: Judged) -> str | None:
    """A worker that was ended on purpose in an attempt that is said to be completed, and of whose failure nobody tells."""
    if len(several) > 1:
        return None
    seen = Counter(rank for each in ledger.supervisions for rank in each.failed.get(verdict.attempts, ()))
    if not seen and (struck := struck_in(ledger, several[0])):
        return f"{struck}, of which no supervisor saw a failure"
    if several[0] not in ledger.attempts or not all(each.is_alone for each in ledger.supervisions):
        return None
    if more := struck_more_often(ledger, several[0], seen):
        return f"{more}, and fewer failures of it were seen"
    return None


def _failed_in(ledger: Ledger, supervision: Supervision, counted: int, number: int) -> str | None:
    """A worker that failed in an attempt, and without which the others did not go on.

    One that was to take the place of a lost one may fail before it does: then that rank fails once more than it is lost.
    """
    others = survived(ledger, number)
    rank = next((rank for rank in fatal(ledger, supervision, counted, number) if rank not in others), None)
    if rank is None:
        return None
    if rank < 0 or number not in ledger.attempts or not recovers_live(ledger, number):
        return f"saw a worker fail in attempt {counted}"
    return f"saw rank {rank} fail in attempt {counted}, and no regroup tells that the others went on without it"


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
    """An attempt that went well to its end though the run is said to have ended otherwise.

    A supervisor that was asked to stop twice kills workers that may have just ended in order.
    """
    number, several = verdict.attempts, meant(ledger, supervision, verdict.attempts)
    if number not in supervision.launches or len(several) > 1 or not is_finished(ledger, several[0]):
        return None
    if any(fatal(ledger, each, number, several[0]) for each in ledger.supervisions):
        return None
    asked = any(number in each.asked for each in ledger.supervisions)
    if asked and (not supervision.is_alone or verdict.because.startswith(SECOND_SIGNAL)):
        return None
    how = _ended(ledger, several[0])
    return f"all ranks {how} in attempt {several[0]}, of which {supervision.who} saw no failure"


def _ended(ledger: Ledger, number: int) -> str:
    for life in ledger.attempts[number]:
        if isinstance(life.ended, Stopped):
            return f"were stopped by their script at step {life.ended.step}"
    return "were done"


def failed_elsewhere(ledger: Ledger) -> str | None:
    """A worker that failed within the loop, of an attempt that all ranks are said to have ended in order.

    What its supervisor saw it train last is the step before its end; one that left its loop may have begun the next.
    """
    for supervision, detect, number in placed(ledger):
        lives = ledger.attempts.get(number, ())
        if any(life.regroups for life in lives) or not is_finished(ledger, number):
            continue
        ended = next((life.ended for life in lives if life.rank == detect.rank), None)
        if not isinstance(ended, Done | Stopped):
            continue
        left = isinstance(ended, Stopped) and ended.left
        if detect.step not in (ended.step - 1, ended.step if left else ended.step - 1):
            return (
                f"{supervision.who} saw rank {detect.rank} fail in step {detect.step} of attempt {number}, which all ranks "
                f"ended in order at step {ended.step}"
            )
    return None
