"""Audit checks of live recovery, in which workers are lost or join while the other workers continue to train.

Every lost worker must be declared in a `regroup` event, together with exactly the samples that its loss left untrained.
A worker that joined must have begun with the state of the other workers. If a supervisor recorded that a worker died,
the other workers must have declared it lost.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.audit.memberships import Join, MemberChange, MemberExit, Memberships, missing_samples, names
from holdfast.audit.rank_session import RankSession
from holdfast.audit.run_record import RunRecord
from holdfast.audit.shard_checks import describe_shards, wrong_shards
from holdfast.audit.step_columns import Numbers, shared_part
from holdfast.audit.training_checks import changes_state, state_after, states_before
from holdfast.events import Detect
from holdfast.finding import SHOWN, Verdict, counted
from holdfast.runs.config import REPLACING


def lost_workers_are_declared(record: RunRecord) -> tuple[Verdict, str]:
    """Check that surviving workers recorded each lost worker, and exactly the samples that its loss left untrained."""
    for memberships in record.live_attempts:
        if error := next(_wrong_declarations(record, memberships), None):
            return "fail", error
    results = [result for memberships in record.live_attempts for result in _wrong_results(record, memberships)]
    errors = (_wrong_start(record, join) for join in record.joins.values())
    failed = [text for verdict, text in results if verdict == "fail"]
    if error := next(iter(failed), None) or next(filter(None, errors), None) or undeclared_death(record):
        return "fail", error
    if not record.attempts:
        return "unknown", "the history has no attempt"
    if not record.live_attempts:
        return "pass", "no worker was lost or joined while the others continued"
    for join in record.joins.values():
        session = join.session
        if session and len(session.steps) and not (session.recover and session.recover.fingerprint):
            return "unknown", f"{session.who} joined at step {join.first_step} without a fingerprint of its state"
    if results:
        return results[0]
    texts = [text for memberships in record.live_attempts for text in _change_texts(memberships)]
    more = ["and more"] if len(texts) > SHOWN else []
    trained = [m for m in record.live_attempts if m.attempt in record.trained]
    unreported = sum(memberships.unreported(record.trained[memberships.attempt]) for memberships in trained)
    more += [f"{counted(unreported, 'share')} reported by the other ranks only"] if unreported else []
    return "pass", "; ".join([f"{len(texts)}: {texts[0]}", *texts[1:SHOWN], *more])


def _change_texts(memberships: Memberships) -> Iterator[str]:
    for change in memberships.changes:
        lost, asleep = ([loss.member for loss in losses] for losses in (change.lost, change.asleep))
        joined = [join.member for join in change.joined if join.member not in lost]
        parts = [f"{names(lost)} lost"] if lost else []
        parts += [f"{names(asleep)} suspended"] if asleep else []
        parts += [f"{names(joined)} joined"] if joined else []
        missing = f", {counted(len(change.missing), 'sample')} declared missing" if change.missing else ""
        older = describe_shards(change)
        yield f"{' and '.join(parts) or 'the members reconnected'} at step {change.step}{missing}{older}"


def _wrong_declarations(record: RunRecord, memberships: Memberships) -> Iterator[str]:
    yield from memberships.errors
    for change in memberships.changes:
        if record.recovery is not None and change.strategy != record.recovery:
            name = f"membership {change.number} of attempt {memberships.attempt}"
            yield f"{name} was formed by {change.strategy!r}, in a run that recovers by {record.recovery!r:.20}"
        for loss in (*change.lost, *change.asleep):
            yield from _events_after_loss(memberships, change, loss)
        for session, regroup, rows in change.declarations:
            name = f"{session.who} declares membership {regroup.number} of attempt {memberships.attempt}"
            if session.rank not in regroup.members:
                yield f"{name}, to which it does not belong"
            if rows.start and session.steps.step[rows.start - 1] >= regroup.step:
                yield f"{name} in step {regroup.step}, which it had reported before"
            if session.joined_as is None and session.recover and regroup.step < session.first_step:
                yield f"{name} in step {regroup.step}, but began with step {session.first_step}"
    yield from _wrong_samples(record, memberships)
    yield from wrong_shards(record, memberships)
    for session in memberships.sessions:
        yield from _wrong_session(record, memberships, session)


def _events_after_loss(memberships: Memberships, change: MemberChange, loss: MemberExit) -> Iterator[str]:
    session = loss.session
    if session is None:
        return
    last_allowed = change.step if change.within else change.step - 1
    declared = [regroup.number for regroup, _ in session.regroups]
    if (
        session.end
        or (declared and declared[-1] >= change.number)
        or any(commit.step > change.step for commit in session.commits)
        or (session.steps.last is not None and session.steps.last > last_allowed)
    ):
        yield f"{session.who} continues after it was lost in step {change.step} of attempt {memberships.attempt}"
    elif any(commit.step > session.reached and not commit.found for commit in session.commits):
        yield f"{session.who} saved more than the {session.reached} steps it had trained in attempt {memberships.attempt}"


def _wrong_samples(record: RunRecord, memberships: Memberships) -> Iterator[str]:
    declared: defaultdict[tuple[int, int], _DeclaredSamples] = defaultdict(_DeclaredSamples)  # by session and step
    for change in memberships.changes:
        expected = Counter(missing_samples(record.sample_plan, change))
        for session, regroup, _ in change.declarations:
            mine = declared[id(session), change.step]
            mine.add(regroup.missing)
            if session.joined_as is not None and regroup.number <= session.joined_as and mine.union <= expected:
                mine.union = mine.sum = expected  # a member that just joined does not know what was lost before
            if expected not in (mine.union, mine.sum):
                yield (
                    f"{session.who} declares {counted(len(regroup.missing), 'sample')} of step {change.step} missing in "
                    f"membership {change.number} of attempt {memberships.attempt}, but the step lacks "
                    f"{counted(expected.total(), 'sample')}: {_reason(change)}"
                )


@dataclass(slots=True)
class _DeclaredSamples:
    """The untrained samples of one step, collected from one or more `regroup` events of a worker process."""

    union: Counter[int] = field(default_factory=Counter)  # valid under `skip`: each event lists the whole step
    sum: Counter[int] = field(default_factory=Counter)  # valid under `forward`: each lists only its own losses

    def add(self, missing: Iterable[int]) -> None:
        samples = Counter(missing)
        self.union, self.sum = self.union | samples, self.sum + samples


def _reason(change: MemberChange) -> str:
    lost = sorted(change.lacking)
    if lost:
        return f"{names(lost)} {'was' if len(lost) == 1 else 'were'} lost in it"
    if change.strategy in REPLACING:
        return f"what is lost is trained again by {change.strategy}"
    return "all gradients were kept" if change.lost and change.within else "no member was lost in it"


def _wrong_session(record: RunRecord, memberships: Memberships, session: RankSession) -> Iterator[str]:
    numbers = [regroup.number for regroup, _ in session.regroups]
    if numbers != sorted({*numbers}):
        yield f"{session.who} declares its memberships of attempt {memberships.attempt} out of order"
    before: Sequence[int] = range(memberships.world)
    for regroup, _ in session.regroups:
        left = [*regroup.lost, *regroup.asleep]
        is_possible = {*before} - {*regroup.members} <= {*left} <= {*before} and len({*left}) == len(left)
        is_joining = session.joined_as is not None and regroup.number <= session.joined_as
        if not is_joining and not is_possible:
            yield (
                f"{session.who} declares {names(regroup.lost)} lost in membership {regroup.number} of attempt "
                f"{memberships.attempt}, where {names(before)} became {names(regroup.members)}"
            )
        before = regroup.members
    has_joined = record.has_joined(session)
    if session.recover and has_joined != (session.joined_as is not None):
        did, say = ("joined", "does not say so") if has_joined else ("did not join", "says so")
        yield f"{session.who} {did} the running attempt {memberships.attempt}, but {say}"
    reported = np.intersect1d(session.steps.step, [step for m, step in memberships.lacking if m == session.rank])
    for step in reported.tolist():
        if step != memberships.void_step(session):
            yield f"{session.who} reports step {step} of attempt {memberships.attempt}, but its share is declared missing"
    yield from _wrong_placement(memberships, session)


def _wrong_placement(memberships: Memberships, session: RankSession) -> Iterator[str]:
    for rows, rank, world in session.placements():
        steps = session.steps.step[rows.start : rows.stop]
        for step in memberships.one_step_per_split(steps):
            members = memberships.split(step)
            if session.rank not in members or (rank, world) != (members.index(session.rank), len(members)):
                yield f"{session.who} trained step {step} as rank {rank} of {world}, but it was split among {names(members)}"
                return


def _wrong_results(record: RunRecord, memberships: Memberships) -> Iterator[tuple[Verdict, str]]:
    for session in record.attempts[memberships.attempt]:
        yield from _not_skipped(record, memberships, session)
        if error := _wrong_replay(record, memberships, session):
            yield "fail", error
    yield from _undeclared_skips(record, memberships)


def _not_skipped(record: RunRecord, memberships: Memberships, session: RankSession) -> Iterator[tuple[Verdict, str]]:
    if not memberships.skipped:
        return
    steps, before = session.steps, states_before(record, session)
    for row in np.flatnonzero(np.isin(steps.step, list(memberships.skipped))).tolist():
        if memberships.void_step(session) == (step := int(steps.step[row])):
            continue
        name = f"step {step} of attempt {memberships.attempt} is declared skipped"
        if steps.stepped[row]:
            yield "fail", f"{name}, but the optimizer of {session.who} stepped"
        elif not (before[row] and steps.shared[row]):
            yield "unknown", f"{name}, but {session.who} has no fingerprint before and after it"
        elif before[row] != steps.shared[row]:
            yield "fail", f"{name}, but the state of {session.who} changed"


def _wrong_replay(record: RunRecord, memberships: Memberships, session: RankSession) -> str | None:
    step = memberships.void_step(session)
    if step is None or not any(e.step == step and e.strategy == "replay" for e in memberships.changes):
        return None
    state = int(session.steps.shared[session.steps.step == step][0])
    replayed = state_after(record, memberships.attempt, step)
    if state and replayed and state != replayed:
        return f"{session.who} finished step {step} of attempt {memberships.attempt} with another state than its replay"
    return None


def _undeclared_skips(record: RunRecord, memberships: Memberships) -> Iterator[tuple[Verdict, str]]:
    """Yield (verdict, message) for each step that was probably skipped after a worker was lost, but not declared so.

    A skipped step changes no state. Steps of gradient accumulation change none either, so a step is reported only if it
    belongs to a longer series of unchanged steps than any other in the attempt."""
    lossy = {step for change, _ in memberships.lost for step in (change.step - 1, change.step)} - memberships.skipped
    if not lossy:
        return
    reported, moved = _moved_steps(record, memberships)
    still = np.intersect1d(np.setdiff1d(reported, moved), list(lossy))
    if not len(still):
        return
    ends = np.concatenate([[reported[0] - 1], moved, [reported[-1] + 1]])
    pauses, places = np.diff(ends), np.searchsorted(moved, still)
    longest = int(np.delete(pauses, [*places, len(moved)]).max(initial=1))  # the last pause may be incomplete
    for step, pause in zip(still.tolist(), pauses[places].tolist(), strict=True):
        if pause > longest:
            name = f"step {step} of attempt {memberships.attempt}"
            yield "unknown", f"members were lost around {name}, which changed nothing but is not declared skipped"


def _moved_steps(record: RunRecord, memberships: Memberships) -> tuple[Numbers, Numbers]:
    """Return two arrays for an attempt: all recorded steps, and the steps that changed the state or were skipped."""
    reported: list[Numbers] = []
    moved: list[Numbers] = [np.array(sorted(memberships.skipped), np.int64)]
    for session in record.attempts[memberships.attempt]:
        steps = session.steps.step
        void = memberships.void_step(session)
        is_valid = (steps < record.sample_plan.steps) & (steps != (-1 if void is None else void))
        reported.append(steps[is_valid])
        moved.append(steps[is_valid & (session.steps.stepped | changes_state(record, session))])
    all_reported = np.unique(np.concatenate(reported))
    return all_reported, np.intersect1d(all_reported, np.concatenate(moved))


def _wrong_start(record: RunRecord, join: Join) -> str | None:
    session = join.session
    if session is None or (recover := session.recover) is None:
        return None
    name = f"{session.who} joined attempt {session.attempt}"
    if session.first_step != join.first_step:
        return f"{name} before step {session.first_step}, but the others say before step {join.first_step}"
    if recover.passed_over:
        return f"{name} from a snapshot instead of from a member"
    if (recover.epoch, recover.cursor) != record.sample_plan.position(join.first_step):
        return f"{name} at epoch {recover.epoch} cursor {recover.cursor}, which is not step {join.first_step}"
    if recover.rng != "keyed":
        return f"{name} with its random generators {recover.rng:.20} instead of keyed"
    before = state_after(record, session.attempt, join.first_step - 1)
    if not before:  # perhaps the member joined before the first step of the attempt
        others = [s for s in record.attempts[session.attempt or 0] if not record.has_joined(s)]
        recovers = (other.recover for other in others if other.first_step == join.first_step)
        before = next((shared_part(r.fingerprint) for r in recovers if r and r.fingerprint), 0)
    if before and recover.fingerprint and shared_part(recover.fingerprint) != before:
        return f"{name}, but its parameters are not those after step {join.first_step - 1}"
    return None


def undeclared_death(record: RunRecord) -> str | None:
    """Return an error message if a supervisor recorded a worker's death that no other worker declared, else None."""
    if not record.supervisor_counts_attempts:
        return None
    deaths: defaultdict[tuple[int, int], list[Detect]] = defaultdict(list)
    for _, detect in record.detects:
        has_died = detect.rank >= 0 and detect.exit is not None and detect.step is not None
        if has_died and detect.attempt in record.attempts:
            deaths[detect.attempt, detect.rank].append(detect)
    for (attempt, member), detects in deaths.items():
        memberships = record.memberships(attempt)
        is_live = memberships.is_live or record.recovery not in (None, "restart")
        if is_live and (error := _unmatched_death(memberships, member, detects)):
            return error
    return None


def _unmatched_death(memberships: Memberships, member: int, deaths: Sequence[Detect]) -> str | None:
    losses = iter([(change, loss) for change, loss in memberships.lost if loss.member == member])
    all_steps = (session.steps for session in memberships.sessions)
    steps = np.unique(np.concatenate([steps.step[steps.reduced > 0] for steps in all_steps]))
    # A member that was suspended may have died in a later step than the last one that it recorded.
    woken = {change.step - 1 for change in memberships.changes if change.asleep}
    for death in deaths:
        step = death.step or 0
        if step in woken:
            continue
        is_declared = any(_is_loss_of(death, change, loss, steps) for change, loss in losses)
        if not is_declared and len(steps) and steps[-1] > step:
            name = f"step {step} of attempt {memberships.attempt}"
            return f"rank {member} died in {name} and the others continued, but did not declare it lost there"
    return None


def _is_loss_of(death: Detect, change: MemberChange, loss: MemberExit, reduced: Numbers) -> bool:
    step = death.step or 0
    between = (reduced > min(step, change.step)) & (reduced < max(step, change.step))
    is_in_all_sums = change.is_complete and change.step > step
    last = loss.session.steps.last if loss.session else None
    return not (between.any() or is_in_all_sums or (last is not None and last > step))
