"""Whether a run did what it set out to do: one plan, trained to its end, and a supervisor who says the same."""

from collections import Counter
from collections.abc import Sequence

from holdfast.audit.finding import CannotTell, Verdict, counted
from holdfast.audit.ledger import Ledger, Supervision
from holdfast.audit.life import Life
from holdfast.events import Done, Judged, Plan, Preempted
from holdfast.geometry import Geometry

PLANNED = ("samples", "batch", "epochs", "seed", "config")  # how often to save, and by which writer, may change
WORDS = ("completed", "gave-up", "preempted", "script-error")


def one_plan(ledger: Ledger) -> tuple[Verdict, str]:
    """All ranks of all attempts train the same samples in the same order."""
    geometry = ledger.geometry
    first, *others = ledger.plans
    for other in others:
        if because := _other_plan(first, other):
            return "fail", because
    told = [plan.data for _, plan in ledger.plans]
    if any(told) and not all(told):
        life, _ = next(each for each in ledger.plans if each[1].data is None)
        return "unknown", f"{life.who} does not say in attempt {life.number} what its data hold, and others do"
    data = "" if any(told) else "; what the samples hold is not on record"
    return "pass", (
        f"{counted(len({life.number for life, _ in ledger.plans}), 'attempt')} by one plan: "
        f"{counted(geometry.epochs, 'epoch')} of {counted(geometry.steps_per_epoch, 'window')} of "
        f"{counted(geometry.batch, 'sample')}; {leftover(geometry)}{data}"
    )


def leftover(geometry: Geometry) -> str:
    """How many samples of an epoch are in none of its windows."""
    rest = geometry.samples % geometry.batch
    return f"{counted(rest, 'sample')} an epoch {'does' if rest == 1 else 'do'} not fill a window and {_waits(rest)}"


def _waits(rest: int) -> str:
    return f"{'waits' if rest == 1 else 'wait'} for the next shuffle"


def _other_plan(one: tuple[Life, Plan], other: tuple[Life, Plan]) -> str | None:
    (a, first), (b, second) = one, other
    who = f"{a.who} in attempt {a.number} and {b.who} in attempt {b.number}"
    said = [(name, getattr(first, name), getattr(second, name)) for name in PLANNED]
    if differing := [f"{name} ({mine}, then {theirs})" for name, mine, theirs in said if mine != theirs]:
        return f"the plans of {who} differ in {', '.join(differing)}"
    if first.data and second.data and first.data != second.data:
        return f"the data sets of {who} hold other samples: a split or shuffle before attach() without a seed?"
    return None


def reached_the_end(ledger: Ledger) -> tuple[Verdict, str]:
    """All ranks trained to the end of the plan, and the last state was committed."""
    end = ledger.geometry.steps
    for lives in ledger.attempts.values():
        for life in lives:
            if isinstance(life.ended, Done) and life.ended.step != end:
                return "fail", f"{life.who} was done at step {life.ended.step} of {end} in attempt {life.number}"
    finished = [number for number in ledger.attempts if is_finished(ledger, number)]
    if finished and ledger.committed == end:
        return "pass", f"all ranks were done at step {end} in attempt {max(finished)}"
    reached = 1 + max((int(steps[-1]) for steps in ledger.trained.values()), default=-1)
    far = f"{counted(reached, 'step')} of {end} trained, {ledger.committed} of them committed"
    if finished and max(finished) == max(ledger.attempts):
        return "fail", f"all ranks were done in attempt {max(finished)}, with {far}"
    return "unknown", f"the run did not reach its end: {far}"


def is_finished(ledger: Ledger, attempt: int) -> bool:
    """Whether all ranks of an attempt were done, or all that were left of them."""
    done = {life.rank for life in ledger.attempts.get(attempt, ()) if isinstance(life.ended, Done)}
    if not done:
        return False
    members = ledger.memberships(attempt).members
    return sum(rank in members for rank in done) == len(members)


def supervisors_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """What supervisors say of the end of the run, and of how often it was started, is what the ranks say."""
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
    last = {each.who: verdict.verdict for each, verdict in judged}
    return "pass", ", ".join(
        f"{who} says {word!r}" for who, word in last.items()
    ) if last else "no supervisor has judged"


def _other_world(ledger: Ledger, supervision: Supervision) -> str | None:
    """An attempt that a lone supervisor started with another number of workers than there were ranks."""
    if _last_start(ledger) < max(ledger.attempts, default=0):
        return None  # it is behind in its count, so its numbers are of other attempts
    for number, workers in supervision.workers.items():
        if number in ledger.attempts and ledger.attempts[number] and ledger.world(number) != workers:
            ranks = counted(ledger.world(number), "rank")
            return f"{supervision.who} started {counted(workers, 'worker')} in attempt {number}, which had {ranks}"
    return None


def _meant(ledger: Ledger, verdict: Judged) -> Sequence[int]:
    """The attempts of ranks that a verdict may be on.

    A supervisor that was killed before it could write down a start is behind in its count ever after.
    """
    behind = max(0, max(ledger.attempts, default=0) - max(_last_start(ledger), verdict.attempts))
    return range(verdict.attempts, verdict.attempts + behind + 1)


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
    if _died(ledger, supervision, verdict.attempts):
        return f"saw a worker fail in attempt {verdict.attempts}"
    meant = _meant(ledger, verdict)
    for number, lives in ledger.attempts.items():
        if number not in meant:
            continue
        if stopped := [life.who for life in lives if isinstance(life.ended, Preempted)]:
            return f"{stopped[0]} was preempted in attempt {number}"
        done = [life.rank for life in lives if isinstance(life.ended, Done)]
        if done and not is_finished(ledger, number):
            if absent := ledger.absent(number):
                raise CannotTell(f"there is no history of {', '.join(absent)}")
            silent = next(rank for rank in ledger.memberships(number).members if rank not in done)
            return f"rank-{silent} never said that it was done in attempt {number}"
    return None


def _died(ledger: Ledger, supervision: Supervision, attempt: int) -> bool:
    """Whether a worker failed in an attempt, and the others did not go on without it."""
    failed = Counter(supervision.failed.get(attempt, []))
    survived = Counter(member for each in ledger.live if each.number == attempt for member, _ in each.lost)
    elsewhere = failed.pop(-1, 0)  # on other nodes
    return bool(failed - survived) or (elsewhere > 0 and not survived)


def _completed(ledger: Ledger, supervision: Supervision, verdict: Judged) -> str | None:
    """An attempt that went well to its end though the run is said to have ended otherwise."""
    troubled = {number for each in ledger.supervisions for number in {*each.failed, *each.asked}}
    if verdict.attempts not in troubled and is_finished(ledger, verdict.attempts):
        return f"all ranks were done in attempt {verdict.attempts}, of which {supervision.who} saw no failure"
    return None
