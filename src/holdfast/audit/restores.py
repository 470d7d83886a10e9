"""Whether what came back at the start of an attempt was what had been committed, the same on all ranks.

Whether a run began with the weights that it was to begin with, on all ranks, and only where nothing came back.
"""

from collections.abc import Iterable

from holdfast.audit.ledger import CommittedSave, Ledger, Restore
from holdfast.audit.step_columns import shared_part
from holdfast.audit.training import state_after
from holdfast.events import Commit
from holdfast.finding import CannotTell, Verdict, counted
from holdfast.sampler.plan import SamplePlan


def other_beginning(ledger: Ledger) -> str | None:
    """Who began with other weights than the others, than the supervisors or run.json tell; or took some in the middle."""
    told = [] if ledger.argv is None else [("the run in run.json", ledger.weights)]
    told += [(each.who, each.weights) for each in ledger.supervisions if each.launches]
    for lives in ledger.attempts.values():
        for life in lives:
            recover = life.recover
            if recover is None or life.arrival is not None:  # who joins has its state from the others
                continue
            if recover.restored is not None:
                if recover.weights is not None:
                    return f"{life.who} took first weights in attempt {life.number}, after step {recover.restored} came back"
                continue
            told.append((f"{life.who} in attempt {life.number}", recover.weights))
    for who, weights in told[1:]:
        if weights != told[0][1]:
            return f"{told[0][0]} began with {_shown(told[0][1])}, and {who} with {_shown(weights)}"
    return None


def beginning(ledger: Ledger) -> str:
    """What a run began with, if not with weights that its script drew, as a part of a sentence."""
    for each in ledger.supervisions:
        if each.weights:
            return f"; began with {_shown(each.weights)}" + (f" of {each.source}" if each.source else "")
    return ""


def _shown(weights: str | None) -> str:
    return "weights of its own" if weights is None else f"the weights {weights[:12]}"


def restores_only_committed(ledger: Ledger) -> tuple[Verdict, str]:
    """A snapshot comes back only if its commit stands, the same on all ranks, and training goes on where it ends."""
    for restore in ledger.restores:
        if restore.recover.restored is not None and restore.commit is None:
            why = (
                "whose commit no longer stood: an abandoned branch came back"
                if restore.abandoned
                else "not committed by then"
            )
            return "fail", f"{_restored(restore)}, {why}"
    if because := _disagreement(ledger.restores) or _wrong_position(ledger):
        return "fail", because
    if not ledger.saves:
        return "unknown", "nothing was committed"
    if because := next(filter(None, (_not_reached(ledger, save) for save in ledger.saves)), None):
        return "fail", because
    came_back = sum(restore.recover.restored is not None for restore in ledger.restores)
    steps = {save.commit.step for save in ledger.saves}
    return "pass", f"{counted(came_back, 'restore')}, {counted(len(steps), 'committed step')}"


def restored_states_agree(ledger: Ledger) -> tuple[Verdict, str]:
    """What a rank had in memory when it went on is, by its digest, what the snapshot was committed with."""
    if not ledger.attempts:
        return "unknown", "no attempt is on record"
    came_back = [restore for restore in ledger.restores if restore.commit]
    for restore in came_back:
        told = (restore.recover.state, restore.commit.state if restore.commit else None)
        if None not in told and told[0] != told[1]:
            return "fail", f"{_restored(restore)}, and went on with another state than was committed"
    for because in (
        other_beginning(ledger),
        _committed_anew(ledger),
        _other_fingerprint(ledger, came_back),
        _one_state_of_two(ledger),
    ):
        if because:
            return "fail", because
    for restore in came_back:
        commit = restore.commit
        if commit and commit.state is None:
            return "unknown", f"the commit of step {commit.step} in attempt {commit.attempt} has no digest of its state"
        if restore.recover.state is None:
            return "unknown", f"{_restored(restore)} and does not say what it had in memory then"
    if not came_back:
        return "pass", f"nothing went on from a snapshot{beginning(ledger)}"
    went_on = f"{len(came_back)} of {counted(len(came_back), 'restore')} went on with what was committed"
    return "pass", f"{went_on}{beginning(ledger)}"


def generators_restored(ledger: Ledger) -> tuple[Verdict, str]:
    """Ranks that go on from a snapshot draw the random numbers that the ranks before them would have drawn."""
    if not ledger.trained:
        return "unknown", "no step was trained and kept"
    for restore in ledger.restores:
        if because := _other_generators(ledger, restore):
            return "fail", because
    came_back = [restore.recover for restore in ledger.restores if restore.recover.restored is not None]
    if not came_back:
        return "pass", "nothing went on from a snapshot"
    keyed = sum(recover.rng == "keyed" for recover in came_back)
    return "pass", f"{len(came_back) - keyed} restored, {keyed} keyed for another number of ranks"


def _disagreement(restores: Iterable[Restore]) -> str | None:
    first: dict[int, Restore] = {}
    for restore in restores:
        other = first.setdefault(restore.recover.attempt, restore)
        if other.recover.restored != restore.recover.restored:
            return f"{_restored(restore)}, and {_restored(other)}"
    return None


def _wrong_position(ledger: Ledger) -> str | None:
    geometry: SamplePlan = ledger.geometry
    for restore in ledger.restores:
        recover = restore.recover
        step, at = recover.restored or 0, (recover.epoch, recover.cursor)
        planned = geometry.position(step) if step <= geometry.steps else None
        if at != planned:
            went_on = f"{_restored(restore)} and went on with epoch {at[0]} cursor {at[1]}"
            return f"{went_on}, not {planned or 'within the plan'}"
    return None


def _not_reached(ledger: Ledger, save: CommittedSave) -> str | None:
    """Who had not trained what a commit is to hold, in the branch that it ends."""
    commit, trainer = save
    name = f"the commit of step {commit.step} in attempt {commit.attempt}"
    if trainer is None or (not commit.found and trainer != commit.attempt):
        return f"{name} holds nothing that this attempt trained"
    reached: dict[int, int] = {}
    for rank, life in ledger.of_ranks(trainer):
        reached[rank] = max(life.reached, reached.get(rank, 0))
    memberships = ledger.memberships(trainer)
    for rank in memberships.basis(commit.step - 1) if commit.step else ():
        if rank not in reached and f"rank-{rank}" not in ledger.lives:
            raise CannotTell(f"there is no history of rank-{rank}, which {name} must hold")
        if (far := reached.get(rank, 0)) < commit.step and not memberships.is_excused(rank, commit.step - 1):
            return f"{name} is of a step that was never reached: rank-{rank} came to step {far} in attempt {trainer}"
    return None


def _committed_anew(ledger: Ledger) -> str | None:
    """A commit that was found of a step whose commit was on record already, with another state."""
    told: dict[tuple[int, int | None], Commit] = {}
    for save in ledger.saves:
        other = told.setdefault((save.commit.step, save.trainer), save.commit)
        states = {other.state, save.commit.state} - {None}
        if len(states) > 1:
            attempts = f"attempts {other.attempt} and {save.commit.attempt}"
            return f"the one snapshot of step {save.commit.step} was committed with other states in {attempts}"
    return None


def _other_fingerprint(ledger: Ledger, restores: Iterable[Restore]) -> str | None:
    """A restore whose parameters are not those that the step before it came out with, whatever its digests say."""
    for restore in restores:
        # As it stood then: the same step may have been trained otherwise since.
        trainer, told = restore.saver, restore.recover.fingerprint
        before = state_after(ledger, trainer, restore.life.start - 1) if trainer is not None else 0
        if before and told and shared_part(told) != before:
            return f"{_restored(restore)}, and its parameters are not those that step {restore.life.start - 1} came out with"
    return None


def _one_state_of_two(ledger: Ledger) -> str | None:
    """Snapshots with one digest, and so with the same parameters, between which the steps say that these changed.

    The digest of a commit is of all that is protected, and the fingerprint of a step of a few parameters: one cannot be
    computed from the other, and of two commits that differ the parameters may be the same.
    """
    told: dict[str, CommittedSave] = {}
    for save in ledger.saves:
        if save.commit.state is None:
            continue
        other = told.setdefault(save.commit.state, save)
        if (other.commit.step, other.trainer) == (save.commit.step, save.trainer):
            continue
        before, after = _came_out(ledger, other), _came_out(ledger, save)
        if before and after and before != after:
            two = " and ".join(f"step {each.commit.step} (attempt {each.commit.attempt})" for each in (other, save))
            return f"the snapshots of {two} have one state by their digests, and the parameters changed from one to the other"
    return None


def _came_out(ledger: Ledger, save: CommittedSave) -> int:
    """The fingerprint of the parameters after the step that a commit ends with; 0 if nobody says."""
    return state_after(ledger, save.trainer, save.commit.step - 1) if save.trainer is not None else 0


def _other_generators(ledger: Ledger, restore: Restore) -> str | None:
    """In what way the generators of this rank did not come back."""
    recover = restore.recover
    if recover.restored is None or restore.commit is None:
        return (
            None if recover.rng == "keyed" else f"{_restored(restore)} with its generators {recover.rng:.20}, not keyed"
        )
    if (saver := restore.saver) is None:
        raise CannotTell(f"the history does not tell how many ranks saved step {recover.restored}")
    savers, now = ledger.memberships(saver).savers(recover.restored), ledger.world(recover.attempt)
    if recover.rng in {"restored" if saved == now else "keyed" for saved in savers}:
        return None
    saved = now if now in savers else min(savers)
    wanted = f"not restored, in the same world of {now}" if saved == now else f"not keyed, after a world of {saved}"
    return f"{_restored(restore)} with its generators {recover.rng:.20}, {wanted}"


def _restored(restore: Restore) -> str:
    return f"{restore} in attempt {restore.recover.attempt}"
