"""Whether a run did what it set out to do: one plan, trained to its end.

How long a run was to be, in each of its attempts: a plan may be made longer, by declaration, and never shorter.
"""

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.events import Commit, Done, Plan, Stopped
from holdfast.finding import Verdict, counted
from holdfast.sampler.plan import SamplePlan


def steps_of(plan: Plan) -> int:
    """How many steps a plan has."""
    return plan.samples // max(1, plan.batch) * plan.epochs if plan.limit is None else plan.limit


def wrong_length(ledger: Ledger) -> str | None:
    """What is wrong with how long the plans are, and with how far those trained who had them."""
    return _other_length(ledger) or next(filter(None, (_too_far(life, plan) for life, plan in ledger.plans)), None)


def _other_length(ledger: Ledger) -> str | None:
    """A plan that is of another length than that of the attempt before, and is not declared to extend the run."""
    longest: tuple[Life, Plan] | None = None
    for life, plan in ledger.plans:
        if longest is None:
            longest = life, plan
            continue
        before, now = steps_of(longest[1]), steps_of(plan)
        if now == before:
            continue
        who = f"{longest[0].who} in attempt {longest[0].number} and {life.who} in attempt {life.number}"
        if now < before or life.number == longest[0].number:
            return f"the plans of {who} have {before} steps, then {now}"
        if not plan.extends:
            return f"the plan of {who} grew from {before} steps to {now}, and nobody said that it is to be extended"
        longest = life, plan
    return None


def _too_far(life: Life, plan: Plan) -> str | None:
    """A rank that trained more steps than its plan has, or ended elsewhere than there."""
    end = steps_of(plan)
    if life.reached > end:
        return f"{life.who} trained to step {life.reached} in attempt {life.number}, by a plan of {end} steps"
    if isinstance(life.ended, Stopped) and life.ended.step >= end:
        return f"{life.who} says in attempt {life.number} that its script stopped at the end of its plan, step {end}"
    return None


def stopped_for_nothing(ledger: Ledger) -> str | None:
    """A run that its script has stopped, and that went on all the same without being extended; or was not stopped."""
    stops: tuple[int, int] | None = None  # the attempt in which it was stopped, and where
    for number, lives in ledger.attempts.items():
        extends = any(life.plan and life.plan.extends for life in lives)
        if stops and not extends and any(life.reached > stops[1] for life in lives if len(life.steps)):
            return (
                f"the script stopped the run at step {stops[1]} in attempt {stops[0]}, and attempt {number} trained on"
            )
        ended = {life.who: life.ended for life in lives if isinstance(life.ended, Stopped | Done)}
        if because := _ended_apart(number, ended):
            return because
        stopped = [each.step for each in ended.values() if isinstance(each, Stopped)]
        stops = (number, stopped[0]) if stopped else None if extends else stops
    return _unfounded(ledger)


def _ended_apart(number: int, ended: dict[str, Stopped | Done]) -> str | None:
    """Ranks that ended an attempt in order, and not all in the same way at the same step."""
    ways = {(type(each), each.step): who for who, each in ended.items()}
    if len(ways) < 2:
        return None
    (one, a), (other, b), *_ = ((who, ended[who]) for who in ways.values())
    return f"{one} {_how(a)} in attempt {number}, and {other} {_how(b)}"


def _how(ended: Stopped | Done) -> str:
    if isinstance(ended, Done):
        return f"was done at step {ended.step}"
    return f"{'was left by' if ended.left else 'was stopped by'} its script at step {ended.step}"


def _unfounded(ledger: Ledger) -> str | None:
    """A stop that the snapshot of its step knows nothing of. A script that leaves its loop may do so after a save."""
    commits: dict[int, Commit] = {}  # the last of each step, up to the attempt
    for number, lives in ledger.attempts.items():
        commits |= {commit.step: commit for life in lives for commit in life.commits}
        for life in lives:
            ended = life.ended
            if (
                isinstance(ended, Stopped)
                and not ended.left
                and ended.step in commits
                and not commits[ended.step].stops
            ):
                return (
                    f"{life.who} says that its script stopped the run at step {ended.step} in attempt {number}, and the "
                    "snapshot that was saved there says nothing of a stop"
                )
    return None


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


def _long(geometry: SamplePlan) -> str:
    windows = f"{counted(geometry.epochs, 'epoch')} of {counted(geometry.steps_per_epoch, 'window')}"
    return windows if geometry.limit is None else f"{counted(geometry.limit, 'step')}, in {windows}"


def _extended(ledger: Ledger) -> str:
    """How the plan grew, if it did."""
    lengths = list(dict.fromkeys(steps_of(plan) for _, plan in ledger.plans))
    return f"extended from {' to '.join(map(str, lengths))} steps; " if len(lengths) > 1 else ""


def leftover(geometry: SamplePlan) -> str:
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
