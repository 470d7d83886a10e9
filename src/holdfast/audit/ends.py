"""Whether a run did what it set out to do: one plan, trained to its end, and a supervisor who says the same."""

from collections.abc import Iterable, Sequence

from holdfast.audit.finding import CannotTell, Verdict, counted
from holdfast.audit.ledger import Ledger, Supervision
from holdfast.audit.life import Life
from holdfast.events import Done, Judged, Plan
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
    """Whether all ranks of an attempt were done."""
    done = {life.rank for life in ledger.attempts.get(attempt, ()) if isinstance(life.ended, Done)}
    return bool(done) and len(done) == ledger.world(attempt)


def supervisors_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """What supervisors say of the end of the run, and of how often it was started, is what the ranks say."""
    judged = [(each, verdict) for each in ledger.supervisions for verdict in each.verdicts]
    last = {each.who: each for each in ledger.supervisions}
    for supervision, verdict in judged:
        because = (
            _miscounted(supervision, verdict) or _unfinished(ledger, verdict) or _finished(ledger, supervision, verdict)
        )
        if because:
            return "fail", f"{supervision.who} says {verdict.verdict!r:.20}, and {because}"
    for supervision, verdict in judged:
        if verdict.verdict == "completed" and not any(is_finished(ledger, each) for each in _meant(ledger, verdict)):
            return "unknown", f"{supervision.who} says 'completed', and no rank says that it was done"
    words = [each.verdicts[-1].verdict for each in last.values() if each.verdicts]
    return (
        "pass",
        f"the last word of {counted(len(words), 'supervisor')}: {', '.join(words)}" if words else "nobody judged",
    )


def _meant(ledger: Ledger, verdict: Judged) -> Sequence[int]:
    """The attempts of ranks that a verdict may be on.

    A supervisor that was killed before it could write down a start is behind in its count ever after.
    """
    counted_here = max((number for each in ledger.supervisions for number in each.launches), default=0)
    behind = max(0, max(ledger.attempts, default=0) - max(counted_here, verdict.attempts))
    return range(verdict.attempts, verdict.attempts + behind + 1)


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


def _unfinished(ledger: Ledger, verdict: Judged) -> str | None:
    """Ranks that were not done though the run is said to be completed."""
    if verdict.verdict != "completed":
        return None
    meant = _meant(ledger, verdict)
    if not any(number in ledger.attempts for number in meant):
        return f"no rank took part in attempt {verdict.attempts}"
    for number in meant:
        silent = list(_not_done(ledger, number))
        if not silent:
            return None
        if len(silent) < ledger.world(number):
            absent = ledger.absent(number)
            if set(silent) <= set(absent):
                raise CannotTell(f"there is no history of {', '.join(absent)}")
            return f"{', '.join(silent)} never said to be done in attempt {number}"
    return None


def _not_done(ledger: Ledger, attempt: int) -> Iterable[str]:
    if attempt not in ledger.attempts:
        return
    done = {life.rank for life in ledger.attempts[attempt] if isinstance(life.ended, Done)}
    world = ledger.world(attempt)
    if len(done) < world:
        yield from (f"rank-{rank}" for rank in range(min(world, len(done) + 64)) if rank not in done)


def _finished(ledger: Ledger, supervision: Supervision, verdict: Judged) -> str | None:
    """An attempt that went well to its end though the run is said to have ended otherwise."""
    troubled = {number for each in ledger.supervisions for number in each.troubled}
    if verdict.verdict != "completed" and verdict.attempts not in troubled and is_finished(ledger, verdict.attempts):
        return f"all ranks were done in attempt {verdict.attempts}, of which {supervision.who} saw no failure"
    return None
