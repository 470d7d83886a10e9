"""Whether members that were lost or joined while others went on are accounted for, and what was lost with them."""

from collections.abc import Iterator

from holdfast.audit.declared import JoinedMember
from holdfast.audit.ledger import Ledger
from holdfast.audit.memberships import Memberships
from holdfast.audit.outcomes import outcomes
from holdfast.audit.step_columns import shared_part
from holdfast.audit.training import state_after
from holdfast.finding import SHOWN, Verdict, counted


def live_recoveries(ledger: Ledger) -> tuple[Verdict, str]:
    """Every loss is declared by all who survived it, with the samples that its window lacks, and nothing else is."""
    for memberships in ledger.live:
        if because := memberships.wrong or _other_strategy(ledger, memberships) or _misplaced(ledger, memberships):
            return "fail", because
    against = [each for memberships in ledger.live for each in outcomes(ledger, memberships)]
    if because := next((because for verdict, because in against if verdict == "fail"), None):
        return "fail", because
    for joined in ledger.joins.values():
        if because := _joined_otherwise(ledger, joined):
            return "fail", because
    if not ledger.attempts:
        return "unknown", "no attempt is on record"
    if not ledger.live:
        return "pass", "nobody was lost or joined while others went on"
    if untold := next((each for each in ledger.joins.values() if not _recovered(each)), None):
        return "unknown", f"{untold.life.who} joined at step {untold.start} and does not say with which state"
    if against:
        return against[0]
    if because := next(filter(None, (_unasked(ledger, memberships) for memberships in ledger.live)), None):
        return "unknown", because
    number = sum(len(memberships.regroups) for memberships in ledger.live)
    told = [said for memberships in ledger.live for said in _told(ledger, memberships)]
    more = ["and more"] if len(told) > SHOWN else []
    vouched = sum(each.vouched(ledger.trained[each.number]) for each in ledger.live if each.number in ledger.trained)
    more += [f"{counted(vouched, 'share')} vouched for by the others"] if vouched else []
    return "pass", "; ".join([f"{number}: {told[0]}", *told[1:SHOWN], *more])


def _told(ledger: Ledger, memberships: Memberships) -> Iterator[str]:
    """What happened, regroup by regroup."""
    before = {*range(ledger.world(memberships.number))}
    for regroup in memberships.regroups:
        come, gone = {*regroup.members} - before, [member for member in regroup.lost if member in before]
        what = [f"{_named(gone)} lost"] if gone else []
        what += [f"{_named(sorted(regroup.asleep))} fell asleep"] if regroup.asleep else []
        what += [f"{_named(sorted(come))} joined"] if come else []
        lacking = f", {counted(len(regroup.missing), 'sample')} declared missing" if regroup.missing else ""
        yield f"{' and '.join(what) or 'the members met again'} at step {regroup.step}{lacking}"
        before = {*regroup.members}


def _named(members: list[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"


def _other_strategy(ledger: Ledger, memberships: Memberships) -> str | None:
    """A run says how it recovers before it begins."""
    for regroup in memberships.regroups:
        if ledger.recovery is not None and regroup.strategy != ledger.recovery:
            return (
                f"membership {regroup.number} of attempt {memberships.number} was found by {regroup.strategy!r}, in a "
                f"run that recovers by {ledger.recovery!r:.20}"
            )
    return None


def _misplaced(ledger: Ledger, memberships: Memberships) -> str | None:
    lives = ledger.attempts[memberships.number]
    return next(filter(None, (memberships.misplaced(life) for life in lives)), None)


def _unasked(ledger: Ledger, memberships: Memberships) -> str | None:
    """Members that fell asleep, and no supervisor tells that it was asked for fewer.

    It says so once they sleep, or once it was asked for others meanwhile. What it was asked for holds after a restart.
    """
    number, world = memberships.number, ledger.world(memberships.number)
    wishes = [wish for each in ledger.supervisions for wish in each.scales]
    before = any(wish.attempt < number and wish.workers < world for wish in wishes)
    last = max(((wish.attempt, wish.number) for wish in wishes), default=(0, 0))
    for regroup in memberships.regroups:
        if regroup.asleep and not before and (number, regroup.number) > last:
            said = f"{_named(sorted(regroup.asleep))} fell asleep at step {regroup.step} of attempt {number}"
            return f"{said}, and no supervisor tells that it was asked for fewer workers"
    return None


def _joined_otherwise(ledger: Ledger, joined: JoinedMember) -> str | None:
    """A member that did not begin with the state that the others had, at the boundary where it joined."""
    life, recover = joined.life, joined.life.recover
    if recover is None:
        return None
    name = f"{life.who} joined attempt {life.number}"
    if life.start != joined.start:
        return f"{name} before step {life.start}, and the others say before step {joined.start}"
    if recover.passed_over:
        return f"{name} from a snapshot, and not from a survivor"
    if (recover.epoch, recover.cursor) != ledger.geometry.position(joined.start):
        return f"{name} at epoch {recover.epoch} cursor {recover.cursor}, which is not step {joined.start}"
    if recover.rng != "keyed":
        return f"{name} with its generators {recover.rng:.20}, not keyed"
    before = state_after(ledger, life.number or 0, joined.start - 1) or _began_with(ledger, joined)
    if before and recover.fingerprint and shared_part(recover.fingerprint) != before:
        return f"{name}, and its parameters are not those that step {joined.start - 1} came out with"
    return None


def _began_with(ledger: Ledger, joined: JoinedMember) -> int:
    """The fingerprint of what the attempt began with, if the member joined before its first step was trained."""
    lives = (each for each in ledger.attempts[joined.life.number or 0] if not ledger.has_joined(each))
    told = (each.recover.fingerprint for each in lives if each.recover and each.start == joined.start)
    return next((shared_part(fingerprint) for fingerprint in told if fingerprint), 0)


def _recovered(joined: JoinedMember) -> bool:
    """Whether a member that joined says with what, or trained nothing."""
    recover = joined.life.recover
    return not len(joined.life.steps) or (recover is not None and recover.fingerprint is not None)
