"""Audit checks of restores: in each attempt, all ranks restored one committed snapshot and their random generators."""

from collections.abc import Iterable

from holdfast.audit.run_record import CommittedSave, Restore, RunRecord
from holdfast.audit.step_columns import shared_part
from holdfast.audit.training_checks import state_after
from holdfast.events import Commit, Launch
from holdfast.finding import CannotTell, Verdict, counted


def restores_only_committed(record: RunRecord) -> tuple[Verdict, str]:
    """Check that in each attempt all ranks restored the same committed snapshot and continued at the step after it."""
    for restore in record.restores:
        if restore.recover.restored is not None and restore.commit is None:
            abandoned = "which a later restore had abandoned"
            return "fail", f"{restore}, {abandoned if restore.is_abandoned else 'not committed by then'}"
    if error := _wrong_restores(record):
        return "fail", error
    if not record.saves:
        return "unknown", "nothing was committed"
    if error := next(filter(None, (_never_reached(record, save) for save in record.saves)), None):
        return "fail", error
    restores = sum(restore.recover.restored is not None for restore in record.restores)
    steps = {save.commit.step for save in record.saves}
    return "pass", f"{counted(restores, 'restore')}, {counted(len(steps), 'committed step')}"


def _wrong_restores(record: RunRecord) -> str | None:
    plan, first = record.sample_plan, dict[int, Restore]()
    for restore in record.restores:
        other = first.setdefault(restore.recover.attempt, restore)
        if other.recover.restored != restore.recover.restored:
            return f"{restore}, but {other}"
    for restore in record.restores:
        step, position = restore.recover.restored or 0, (restore.recover.epoch, restore.recover.cursor)
        planned = plan.position(step) if step <= plan.steps else None
        if position != planned:
            where = f"epoch {position[0]} cursor {position[1]}"
            return f"{restore} and continued with {where} instead of {planned or 'a step of the plan'}"
    return None


def _never_reached(record: RunRecord, save: CommittedSave) -> str | None:
    commit, trainer = save
    name = f"the commit of step {commit.step} in attempt {commit.attempt}"
    if trainer is None or trainer not in record.attempts or (not commit.found and trainer != commit.attempt):
        return f"{name} covers no step of this attempt"
    reached: dict[int, int] = {}
    for session in record.attempts[trainer]:
        reached[session.rank] = max(session.reached, reached.get(session.rank, 0))
    memberships = record.memberships(trainer)
    for rank in memberships.split(commit.step - 1) if commit.step else ():
        if rank not in reached and f"rank-{rank}" not in record.sessions:
            raise CannotTell(f"there is no history of rank-{rank}, whose steps {name} covers")
        if (steps := reached.get(rank, 0)) < commit.step and not memberships.is_excused(rank, commit.step - 1):
            return f"{name} is of a step that was never reached: rank-{rank} trained {steps} steps in attempt {trainer}"
    return None


def restored_states_agree(record: RunRecord) -> tuple[Verdict, str]:
    """Check that each restored state has the digest that was recorded when its snapshot was committed."""
    if not record.attempts:
        return "unknown", "the history has no attempt"
    restores = [(restore, restore.commit) for restore in record.restores if restore.commit]
    for restore, commit in restores:
        if restore.recover.state and commit.state and restore.recover.state != commit.state:
            return "fail", f"{restore}, but continued with another state than was committed"
    if error := (
        _different_weights(record)
        or _recommitted(record)
        or _wrong_fingerprint(record, (restore for restore, _ in restores))
        or _one_digest_of_two_states(record)
    ):
        return "fail", error
    for restore, commit in restores:
        if commit.state is None:
            return "unknown", f"the commit of step {commit.step} in attempt {commit.attempt} has no digest of its state"
        if restore.recover.state is None:
            return "unknown", f"{restore} without a digest of what it had in memory then"
    text = f"{len(restores)} of {counted(len(restores), 'restore')} continued with what was committed"
    text = text if restores else "nothing was restored from a snapshot"
    for _, launch in record.launches:
        if isinstance(launch, Launch) and launch.weights:
            source = f" from {launch.source}" if launch.source else ""
            return "pass", f"{text}; began with {_shown(launch.weights)}{source}"
    return "pass", text


def _different_weights(record: RunRecord) -> str | None:
    weights = [("run.json", record.facts.weights)] if record.facts else []
    weights += [(who, launch.weights) for who, launch in record.launches if isinstance(launch, Launch)]
    for sessions in record.attempts.values():
        for session in sessions:
            recover = session.recover
            if recover is None or session.joined_as is not None:
                continue
            if recover.restored is None:
                weights.append((f"{session.who} in attempt {session.attempt}", recover.weights))
            elif recover.weights is not None:
                return f"{session.who} took initial weights in attempt {session.attempt}, after restoring step {recover.restored}"
    for who, digest in weights[1:]:
        if digest != weights[0][1]:
            return f"the initial weights are {_shown(weights[0][1])} by {weights[0][0]}, but {_shown(digest)} by {who}"
    return None


def _shown(weights: str | None) -> str:
    return "those of the script" if weights is None else f"the weights {weights[:12]}"


def _recommitted(record: RunRecord) -> str | None:
    commits: dict[tuple[int, int | None], Commit] = {}
    for commit, trainer in record.saves:
        other = commits.setdefault((commit.step, trainer), commit)
        if len({other.state, commit.state} - {None}) > 1:
            attempts = f"attempts {other.attempt} and {commit.attempt}"
            return f"the one snapshot of step {commit.step} was committed with different states in {attempts}"
    return None


def _wrong_fingerprint(record: RunRecord, restores: Iterable[Restore]) -> str | None:
    for restore in restores:
        # The attempt as it counted then: the same step may have been trained differently since.
        step = restore.session.first_step - 1
        before = state_after(record, restore.trainer, step)
        fingerprint = restore.recover.fingerprint
        if before and fingerprint and shared_part(fingerprint) != before:
            return f"{restore}, but its parameters are not those after step {step}"
    return None


def _one_digest_of_two_states(record: RunRecord) -> str | None:
    # The reverse is no error: a digest covers the whole saved state, and a fingerprint only some parameters.
    first: dict[str, tuple[CommittedSave, int]] = {}
    for save in record.saves:
        fingerprint = state_after(record, save.trainer, save.commit.step - 1)
        if save.commit.state is None or not fingerprint:
            continue
        other, other_fingerprint = first.setdefault(save.commit.state, (save, fingerprint))
        if fingerprint != other_fingerprint:
            steps = (f"step {commit.step} (attempt {commit.attempt})" for commit, _ in (other, save))
            return f"the snapshots of {' and '.join(steps)} have one digest, but the parameters changed between them"
    return None


def generators_restored(record: RunRecord) -> tuple[Verdict, str]:
    """Check that each rank restored its random generators, or keyed (seeded) them if another number of ranks saved them.

    A start without a snapshot also keys the generators, but is no restore."""
    if not record.trained:
        return "unknown", "no step was trained that counts"
    for restore in record.restores:
        if error := _wrong_generators(record, restore):
            return "fail", error
    recovers = [restore.recover for restore in record.restores if restore.recover.restored is not None]
    if not recovers:
        return "pass", "nothing was restored from a snapshot"
    keyed = sum(recover.rng == "keyed" for recover in recovers)
    text = f"{len(recovers) - keyed} of {counted(len(recovers), 'restore')} with the generators as saved"
    return "pass", text + (f", {keyed} keyed for another number of ranks" if keyed else "")


def _wrong_generators(record: RunRecord, restore: Restore) -> str | None:
    recover = restore.recover
    name = f"{restore} with its random generators {recover.rng:.20}"
    if recover.restored is None or restore.commit is None:
        return None if recover.rng == "keyed" else f"{name} instead of keyed"
    if restore.trainer is None:
        raise CannotTell(f"the history does not say how many ranks saved step {recover.restored}")
    sizes = record.memberships(restore.trainer).world_sizes_of_save(recover.restored)
    now = record.world(recover.attempt)
    groups, before = record.tensor_parallel(recover.attempt), record.tensor_parallel(restore.trainer)
    if groups != before:
        wrong = f"{name} instead of keyed, after tensor-parallel groups of {before}, not {groups}"
        return None if recover.rng == "keyed" else wrong
    if recover.rng in {"restored" if size == now else "keyed" for size in sizes}:
        return None
    if now in sizes:
        return f"{name} instead of restored, with the same world size {now}"
    return f"{name} instead of keyed, after a world size of {min(sizes)}"
