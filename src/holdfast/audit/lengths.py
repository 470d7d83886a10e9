"""How long a run was to be, in each of its attempts: a plan may be made longer, by declaration, and never shorter."""

from holdfast.audit.ledger import Ledger
from holdfast.audit.life import Life
from holdfast.events import Commit, Done, Plan, Stopped


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
