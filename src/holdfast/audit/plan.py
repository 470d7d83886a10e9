"""Whether a run did what it set out to do: one plan, trained to its end."""

from holdfast.audit.ledger import Ledger
from holdfast.audit.lengths import steps_of, stopped_for_nothing, wrong_length
from holdfast.audit.life import Life
from holdfast.events import Done, Plan, Stopped
from holdfast.finding import Verdict, counted
from holdfast.sampler.plan import Geometry

# How often to save, and by which writer, may change; longer it may be.
PLANNED = ("samples", "batch", "seed", "config", "own", "loader")


def one_plan(ledger: Ledger) -> tuple[Verdict, str]:
    """All ranks of all attempts train the same samples in the same order."""
    geometry = ledger.geometry
    first, *others = ledger.plans
    for other in others:
        if because := _other_plan(first, other):
            return "fail", because
    if because := wrong_length(ledger) or _other_seed(ledger):
        return "fail", because
    told = [plan.data for _, plan in ledger.plans]
    if any(told) and not all(told):
        life, _ = next(each for each in ledger.plans if each[1].data is None)
        return "unknown", f"{life.who} does not say in attempt {life.number} what its data hold, and others do"
    data = "" if any(told) else "; what the samples hold is not on record"
    return "pass", (
        f"{counted(len({life.number for life, _ in ledger.plans}), 'attempt')} by one plan: {_long(geometry)} of "
        f"{counted(geometry.batch, 'sample')}; {_extended(ledger)}{leftover(geometry)}{data}"
    )


def _long(geometry: Geometry) -> str:
    windows = f"{counted(geometry.epochs, 'epoch')} of {counted(geometry.steps_per_epoch, 'window')}"
    return windows if geometry.limit is None else f"{counted(geometry.limit, 'step')}, in {windows}"


def _extended(ledger: Ledger) -> str:
    """How the plan grew, if it did."""
    lengths = list(dict.fromkeys(steps_of(plan) for _, plan in ledger.plans))
    return f"extended from {' to '.join(map(str, lengths))} steps; " if len(lengths) > 1 else ""


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


def _other_seed(ledger: Ledger) -> str | None:
    """Who began with another seed than the run was trained with since rank 0 first told of anything that was trained."""
    lives = (life for life in ledger.lives.get("rank-0", ()) if life.commits or len(life.steps))
    first = next(lives, None)
    if first is None or first.began is None or first.began.seed is None:
        return None
    for number, several in ledger.attempts.items():
        for life in several if number >= first.began.attempt else ():
            if life.began and life.began.seed not in (None, first.began.seed):
                trained = f"attempt {first.number} trained with {first.began.seed}"
                return f"{life.who} began attempt {number} with the seed {life.began.seed}, and {trained}"
    return None


def reached_the_end(ledger: Ledger) -> tuple[Verdict, str]:
    """All ranks trained to the end of the plan, or their script stopped them, and the last state was committed."""
    end = ledger.geometry.steps
    for lives in ledger.attempts.values():
        for life in lives:
            planned = steps_of(life.plan) if life.plan else end
            if isinstance(life.ended, Done) and life.ended.step != planned:
                return "fail", f"{life.who} was done at step {life.ended.step} of {planned} in attempt {life.number}"
    if because := stopped_for_nothing(ledger):
        return "fail", because
    finished = [number for number in ledger.attempts if is_finished(ledger, number)]
    if because := _unsaved(ledger, set(finished[:-1])):  # the last one is looked at below
        return "fail", because
    last = max((number for number, steps in ledger.trained.items() if len(steps)), default=0)
    if finished and max(finished) >= last and ledger.committed == end:
        return "pass", f"all ranks were done at step {end} in attempt {max(finished)}"
    if finished and (stop := _stopped(ledger, max(finished))) is not None and ledger.committed == stop:
        return "pass", f"stopped by the script at step {stop} of {end}, on all ranks, in attempt {max(finished)}"
    reached = 1 + max((int(steps[-1]) for steps in ledger.trained.values()), default=-1)
    far = f"{counted(reached, 'step')} of {end} trained, {ledger.committed} of them committed"
    if finished and max(finished) == max(ledger.attempts):
        return "fail", f"all ranks were done in attempt {max(finished)}, with {far}"
    if reached == end == ledger.committed:
        silent = [life.who for life in ledger.attempts[max(ledger.attempts)] if not isinstance(life.ended, Done)]
        who = ", ".join(silent[:4])
        return (
            "unknown",
            f"all {counted(end, 'step')} were trained and committed, but not all ranks say so: {who} does not",
        )
    return "unknown", f"the run did not reach its end: {far}"


def _unsaved(ledger: Ledger, finished: set[int]) -> str | None:
    """The first of these attempts that was done, or stopped by its script, before its last state was committed."""
    saved: set[int] = set()
    for number, lives in ledger.attempts.items():
        saved |= {commit.step for life in lives for commit in life.commits}
        ends = [life.ended.step for life in lives if isinstance(life.ended, Done | Stopped)]
        if number in finished and (unsaved := set(ends) - saved):
            return f"attempt {number} ended at step {min(unsaved)}, and nobody tells that it was committed"
    return None


def _stopped(ledger: Ledger, attempt: int) -> int | None:
    """Where the script has stopped an attempt."""
    stops = (life.ended.step for life in ledger.attempts[attempt] if isinstance(life.ended, Stopped))
    return next(stops, None)


def is_finished(ledger: Ledger, attempt: int) -> bool:
    """Whether all ranks of an attempt were done, or all that were left of them."""
    done = {life.rank for life in ledger.attempts.get(attempt, ()) if isinstance(life.ended, Done | Stopped)}
    if not done:
        return False
    members = ledger.memberships(attempt).members
    return sum(rank in members for rank in done) == len(members)
