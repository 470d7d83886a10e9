"""Audit checks of step results: each step was trained, ranks agree, and repeated steps gave the same state.

A step that was trained again after a restore is compared bit by bit with the first time, if both have the same past:
the same world sizes, tensor-parallel groups and script arguments. All-reduce over other ranks rounds differently.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.audit.rank_session import RankSession
from holdfast.audit.run_record import RunRecord
from holdfast.audit.step_columns import Numbers, shared_part, whole_part
from holdfast.audit.step_sets import without
from holdfast.finding import SHOWN, Verdict, counted
from holdfast.history.lineage import EVERY_STEP

# What the results depend on, such as world sizes, each with the step from which on it was valid.
Past: TypeAlias = tuple[tuple[int, object], ...]
Rows: TypeAlias = "NDArray[np.intp] | slice"
ONLY_BUFFERS = "state of the buffers, such as BatchNorm's averages, but with the same parameters,"


def every_step_was_trained(record: RunRecord) -> tuple[Verdict, str]:
    """Check that every step had a backward pass or an optimizer step, or changed the state of the model."""
    trained, unknown = 0, 0
    idle: dict[int, str] = {}  # step -> the first rank that received it and did not train it
    for attempt in record.trained:
        for session in record.attempts[attempt]:
            is_trained, is_idle = _trained_and_idle(record, session)
            trained, unknown = trained + int(is_trained.sum()), unknown + int((~is_trained).sum())
            if is_idle.any():
                for step in session.steps.step[record.counted_rows(session)][is_idle].tolist():
                    idle.setdefault(step, f"{session.who} in attempt {attempt}")
    if idle:
        return "fail", _idle_text(record, idle)
    if error := next(filter(None, (_different_work(record, attempt) for attempt in record.trained)), None):
        return "fail", error
    if error := _never_stepped_or_reduced(record):
        return "fail", error
    if unknown or not trained:
        return "unknown", f"the history does not say whether {counted(unknown, 'share')} of a step was trained"
    shares = f"{counted(trained, 'share')} of steps trained"
    return "pass", f"{shares}: gradients reduced, optimizers stepped, or states changed"


def _idle_text(record: RunRecord, idle: Mapping[int, str]) -> str:
    first = min(idle)
    return (
        f"{record.step_name(first)} was handed out to {idle[first]} but not trained: no backward pass, no optimizer step, "
        f"and the state did not change ({counted(len(idle), 'step')} in all)"
    )


def _trained_and_idle(record: RunRecord, session: RankSession) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two masks over the steps of `session` that were not rolled back: surely trained, and surely not trained.

    Both masks are False at a step if the history does not say whether it was trained."""
    worked, state, before = session.steps.worked, session.steps.shared, states_before(record, session)
    known, is_same = (state != 0) & (before != 0), state == before
    rows = record.counted_rows(session)
    skipped = record.memberships(session.attempt or 0).skipped
    if skipped:  # the samples of a skipped step are declared missing, so it need not be trained
        worked = worked | np.isin(session.steps.step, list(skipped))
    return (worked | (known & ~is_same))[rows], (~worked & known & is_same)[rows]


def changes_state(record: RunRecord, session: RankSession) -> NDArray[np.bool_]:
    """Return a mask of the steps of `session` that changed the fingerprint (hash) of the model's state."""
    state, before = session.steps.shared, states_before(record, session)
    mask: NDArray[np.bool_] = (state != 0) & (before != 0) & (state != before)
    return mask


def states_before(record: RunRecord, session: RankSession) -> Numbers:
    """Return the fingerprint hash of the state before each step of `session`, or 0 where it is not recorded."""
    state = session.steps.shared
    before: Numbers = np.concatenate([[_first_state(record, session)], state[:-1]])[: len(state)]
    return before


def _first_state(record: RunRecord, session: RankSession) -> int:
    if session.recover and session.recover.fingerprint:
        return shared_part(session.recover.fingerprint)
    last = session.first_step - 1
    return state_after(record, record.lineage.trainer(last), last) if last >= 0 else 0


def state_after(record: RunRecord, attempt: int | None, step: int) -> int:
    """Return the fingerprint hash of the state after `step` of `attempt`, or 0 if it is not recorded."""
    if attempt is None:
        return 0
    for session in record.attempts.get(attempt, ()):
        state = session.steps.shared_after(step)
        is_void = bool(record.live_attempts) and record.memberships(attempt).void_step(session) == step
        if state is not None and not is_void:
            return state
    return 0


def _never_stepped_or_reduced(record: RunRecord) -> str | None:
    sessions = [(s, record.counted_rows(s)) for attempt in record.trained for s in record.attempts[attempt]]
    shared = (session.steps.shared[rows] for session, rows in sessions if len(rows))
    states = {state for column in shared for state in (int(column.min()), int(column.max()))}
    steps = sum(
        len(without(trained, np.array(sorted(record.memberships(attempt).skipped), np.int64)))
        for attempt, trained in record.trained.items()
    )
    has_stepped = any(session.steps.stepped[rows].any() for session, rows in sessions)
    if steps >= 2 and len(states) == 1 and 0 not in states and not has_stepped:
        return f"in {steps} steps no optimizer stepped, and the state did not change"
    is_alone = min((record.world(attempt) for attempt in record.trained), default=1) == 1
    had_backward = any(session.steps.had_backward[rows].any() for session, rows in sessions)
    has_reduced = any(session.steps.reduced[rows].any() for session, rows in sessions)
    if had_backward and not is_alone and not has_reduced:
        return "every rank kept its gradients to itself in every step: none were all-reduced"
    return None


def _different_work(record: RunRecord, attempt: int) -> str | None:
    for first, other, a, b in _trained_together(record, attempt):
        who, steps = f"{first.who} and {other.who}", first.steps.step[a]
        if len(rows := np.flatnonzero(first.steps.stepped[a] != other.steps.stepped[b])):
            return f"only one of {who} had an optimizer step in step {steps[rows[0]]} of attempt {attempt}"
        if len(rows := np.flatnonzero(first.steps.reduced[a] != other.steps.reduced[b])):
            numbers = f"{first.steps.reduced[a][rows[0]]} and {other.steps.reduced[b][rows[0]]}"
            return f"{who} reduced {numbers} backward passes in step {steps[rows[0]]} of attempt {attempt}"
    return None


def _trained_together(record: RunRecord, attempt: int) -> Iterator[tuple[RankSession, RankSession, Rows, Rows]]:
    """Yield (process, other process, rows, other rows) for processes of `attempt` that trained the same steps.

    The rows are the indices of these steps in each process. If no worker was lost or joined, the process with the most
    steps is paired with every other process."""
    sessions, memberships = record.attempts[attempt], record.memberships(attempt)
    if not memberships.is_live:
        longest = max(sessions, key=lambda session: len(session.steps))
        yield from ((longest, other, *_same_steps(longest, other)) for other in sessions if other is not longest)
        return
    for one, other in _overlapping(sessions):
        a, b = _same_steps(one, other)
        void = [step for step in map(memberships.void_step, (one, other)) if step is not None]
        is_valid = ~np.isin(one.steps.step[a], void)
        yield one, other, np.arange(len(one.steps))[a][is_valid], np.arange(len(other.steps))[b][is_valid]


def _same_steps(a: RankSession, b: RankSession) -> tuple[Rows, Rows]:
    x, y = a.steps.step, b.steps.step
    if len(x) and len(y) and a.steps.is_consecutive and b.steps.is_consecutive:
        first = max(int(x[0]), int(y[0]))  # Python's integers: one more than the last step may exceed 64 bits
        end = max(min(int(x[-1]), int(y[-1])) + 1, first)
        return slice(first - int(x[0]), end - int(x[0])), slice(first - int(y[0]), end - int(y[0]))
    _, rows, others = np.intersect1d(x, y, return_indices=True)
    return rows, others


def _overlapping(sessions: Sequence[RankSession]) -> Iterator[tuple[RankSession, RankSession]]:
    """Yield every pair of worker processes whose ranges of trained steps overlap.

    The two processes of a pair are in the order of `sessions`."""
    spans = [(int(s.steps.step.min()), int(s.steps.step.max()), i) for i, s in enumerate(sessions) if len(s.steps)]
    active: list[tuple[int, int]] = []  # last steps, with the index of their session
    for first, last, i in sorted(spans):
        active = [span for span in active if span[0] >= first]
        yield from ((sessions[min(i, j)], sessions[max(i, j)]) for _, j in active)
        active.append((last, i))


class _Difference(NamedTuple):
    """The steps whose results in attempt `again` differ from their results in attempt `first`, in order.

    `is_first` is True if the first of them is also the first step that both attempts trained."""

    steps: tuple[int, ...]
    who: str
    what: str
    first: int
    again: int
    is_first: bool

    @property
    def step(self) -> int:
        return self.steps[0]


class _StepRange(NamedTuple):
    """The steps of a worker process from `first` up to, but not including, `end`."""

    session: RankSession
    first: int
    end: int


@dataclass(slots=True)
class _Comparison:
    """The steps that were trained more than once, grouped by whether their results were the same."""

    same: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)  # without a fingerprint
    not_comparable: set[int] = field(default_factory=set)  # trained again, but never with the same past
    differences: list[_Difference] = field(default_factory=list)
    same_on_rank_0: set[int] = field(default_factory=set)
    continued: dict[int, int] = field(default_factory=dict)  # attempts that repeated steps, with their first steps


def repeated_steps_agree(record: RunRecord) -> tuple[Verdict, str]:
    """Check that repeated steps gave bitwise equal results, and that all ranks had the same state after every step."""
    for attempt in record.attempts:
        if error := _different_states(record, attempt):
            return "fail", error
    found = _compare_repeated(record)
    explained = _ranks_with_own_buffers(record) if found.differences else set()
    differences = [
        item
        for item in found.differences
        if not (item.what == ONLY_BUFFERS and item.is_first and item.who in explained)
    ]
    if differences:
        return "fail", _difference_text(record, found, differences)
    repeated = len(found.same | found.unknown)
    arguments = " or with other arguments" if len({*_commands(record).values()}) > 1 else ""
    other = counted(len(found.not_comparable), "step")
    rest = f"; {other} trained again by another number of ranks{arguments}" if found.not_comparable else ""
    if explained and found.differences:
        rest += f"; {', '.join(sorted(explained))} had buffers of its own and continued with rank-0's, which were saved"
    if found.unknown:
        return "unknown", f"{len(found.unknown)} of {counted(repeated, 'repeated step')} without a fingerprint{rest}"
    if text := next(filter(None, (_missing_fingerprint(record, attempt) for attempt in record.attempts)), ""):
        return "unknown", text
    if not repeated:
        return "pass", f"no step was trained again by as many ranks{rest}" if rest else "no step was trained again"
    return (
        "pass",
        f"{repeated} of {counted(repeated, 'repeated step')} came out the same; {_continued_text(found)}{rest}",
    )


def _difference_text(record: RunRecord, found: _Comparison, differences: Sequence[_Difference]) -> str:
    first = min(differences, key=lambda item: (item.again, item.step, item.who))
    is_sharded = any(plan.sharded for _, plan in record.plans)
    what = "state" if is_sharded and first.what == ONLY_BUFFERS else first.what  # shards are fingerprinted with buffers
    differing = {step for item in differences for step in item.steps}
    ranks = sorted({item.who for item in differences}, key=lambda who: int(who.removeprefix("rank-")))
    repeated = len(found.same | found.unknown | differing)
    is_same_on_rank_0 = first.step in found.same_on_rank_0 and "rank-0" not in ranks
    return (
        f"{len(differing)} of {counted(repeated, 'repeated step')} came out otherwise, on {_listed(ranks)}; first, "
        f"{record.step_name(first.step)} came out with another {what} in attempt {first.again} than in {first.first}"
        f"{', but rank-0 came out the same' if is_same_on_rank_0 else ''}; {_continued_text(found)}"
    )


def _continued_text(found: _Comparison) -> str:
    """Return from which steps the attempts continued that repeated steps."""
    return _listed([f"attempt {attempt} continued from step {step}" for attempt, step in found.continued.items()])


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _ranks_with_own_buffers(record: RunRecord) -> set[str]:
    """Return the ranks that lost their own buffers in a restore, because a snapshot has only the buffers of rank 0.

    Before the save, the buffers of these ranks (such as the running averages of BatchNorm) differed from rank 0's."""
    fingerprints = {r.recover.attempt: r.recover.fingerprint for r in record.restores if r.session.rank == 0}
    ranks: set[str] = set()
    for restore in record.restores:
        session, fingerprint = restore.session, restore.recover.fingerprint
        if restore.trainer is None or fingerprint is None or fingerprint != fingerprints.get(restore.recover.attempt):
            continue
        for before in record.attempts.get(restore.trainer, ()):
            is_last = (before.steps.step == session.first_step - 1) & (before.steps.shared == shared_part(fingerprint))
            if before.who == session.who != "rank-0" and (before.steps.state[is_last] != whole_part(fingerprint)).any():
                ranks.add(session.who)
    return ranks


def _compare_repeated(record: RunRecord) -> _Comparison:
    """Compare the results of steps that were trained again with the same world sizes and script arguments as before."""
    found = _Comparison()
    earlier: defaultdict[tuple[int, int], list[_StepRange]] = defaultdict(list)  # by number of the past, and rank
    numbers: dict[Past, int] = {}  # a past may have hundreds of items, and is looked up for every session
    past: Past = ()
    commands = _commands(record)
    reached = 0
    for attempt, sessions in record.attempts.items():
        compared: set[int] = set()
        for first, end, what in _variations(record, attempt) if any(len(s.steps) for s in sessions) else ():
            past = tuple(item for item in past if item[0] < first)  # what remains after a restore of step `first`
            conditions = (what, record.tensor_parallel(attempt), commands[attempt])
            if not past or past[-1][1] != conditions:
                past = (*past, (first, conditions))
            number = numbers.setdefault(past, len(numbers))
            for session in sessions:
                void = record.memberships(attempt).void_step(session)
                last = min(end, session.reached if void is None else void, record.trusted_end(attempt))
                steps = _StepRange(session, max(first, session.first_step), last)
                if steps.first >= steps.end:
                    continue
                for other in earlier[number, session.rank]:
                    compared |= _compare(other, steps, found)
                earlier[number, session.rank] = _add_range(earlier[number, session.rank], steps)
        again = {step for session in sessions for step in session.steps.step[session.steps.step < reached].tolist()}
        found.not_comparable |= again - compared
        if compared and attempt != min(record.attempts):
            found.continued[attempt] = _first_step(record, attempt)
        ends = (min(session.reached, record.trusted_end(attempt)) for session in sessions if len(session.steps))
        reached = max(reached, max(ends, default=0))
    return found


def _commands(record: RunRecord) -> dict[int, str | None]:
    commands: dict[int, str | None] = dict.fromkeys(record.attempts)
    for session, plan in record.plans:
        commands[session.attempt or 0] = commands[session.attempt or 0] or plan.command
    last = next((command for command in commands.values() if command), None)
    for attempt, command in commands.items():
        last = commands[attempt] = command or last
    return commands


def _variations(record: RunRecord, attempt: int) -> Iterator[tuple[int, int, object]]:
    start = _first_step(record, attempt)
    for (first, what), (end, _) in pairwise([*record.memberships(attempt).variations(), (EVERY_STEP, None)]):
        if end > start:
            yield max(first, start), end, what


def _first_step(record: RunRecord, attempt: int) -> int:
    sessions = record.attempts[attempt]
    return max((s.first_step for s in sessions if s.recover and not record.has_joined(s)), default=0)


def _add_range(ranges: Sequence[_StepRange], added: _StepRange) -> list[_StepRange]:
    if not len(added.session.steps):
        return list(ranges)
    return [*(steps for steps in ranges if steps.first < added.first or steps.end > added.end), added]


def _compare(one: _StepRange, again: _StepRange, found: _Comparison) -> set[int]:
    """Compare the results of the steps that both ranges contain, add the outcome to `found`, and return these steps."""
    first, end = max(one.first, again.first), min(one.end, again.end)
    if first >= end:
        return set()
    earlier, later = one.session, again.session
    a, b = _same_steps(earlier, later)
    steps = earlier.steps.step[a]
    is_inside = (steps >= first) & (steps < end)
    if not is_inside.all():
        a, b = np.arange(len(earlier.steps))[a][is_inside], np.arange(len(later.steps))[b][is_inside]
        steps = steps[is_inside]
    before, after = earlier.steps.state[a], later.steps.state[b]
    unknown = (before == 0) | (after == 0)
    states = ~unknown & (before != after)
    with np.errstate(invalid="ignore"):
        losses = np.abs(earlier.steps.loss[a] - later.steps.loss[b]) > 0  # where both were logged
    buffers = states & (earlier.steps.shared[a] == later.steps.shared[b])
    for what, differs in (("state", states & ~buffers), (ONLY_BUFFERS, buffers), ("loss", losses)):
        if differs.any():
            different = tuple(steps[differs].tolist())
            attempts = (earlier.attempt or 0, later.attempt or 0)
            found.differences.append(_Difference(different, later.who, what, *attempts, is_first=bool(differs[0])))
    found.unknown |= set(steps[unknown].tolist())
    same = set(steps[~unknown & ~states & ~losses].tolist())
    found.same |= same
    found.same_on_rank_0 |= same if later.rank == 0 else set()
    return set(steps.tolist())


def _missing_fingerprint(record: RunRecord, attempt: int) -> str | None:
    sessions = record.attempts[attempt]
    blank = [session.steps.step[session.steps.shared == 0] for session in sessions]
    lacking, total = sum(map(len, blank)), sum(len(session.steps) for session in sessions)
    if lacking == total > 0 and record.memberships(attempt).is_live:
        return f"no step of attempt {attempt} has a fingerprint of its state, and members were lost or joined in it"
    if lacking in (0, total):
        return None
    session, steps = next(pair for pair in zip(sessions, blank, strict=True) if len(pair[1]))
    others = "its other steps have" if len(steps) < len(session.steps) else "other ranks have"
    return f"{session.who} has no fingerprint of its state after step {steps[0]} of attempt {attempt}, but {others}"


def _different_states(record: RunRecord, attempt: int) -> str | None:
    first: int | None = None
    for mine, other, a, b in _trained_together(record, attempt):
        one, two = mine.steps.shared[a], other.steps.shared[b]
        is_trusted = mine.steps.step[a] < record.trusted_end(attempt)
        differing = np.flatnonzero(is_trusted & (one != 0) & (two != 0) & (one != two))
        if len(differing):
            step = int(mine.steps.step[a][differing[0]])
            first = step if first is None else min(first, step)
    if first is None:
        return None
    states = {
        session.who: int(session.steps.shared[rows[0]])
        for session in record.attempts[attempt]
        if len(rows := np.flatnonzero(session.steps.step == first))
    }
    (most, _), *_ = Counter(states.values()).most_common()
    others = ", ".join(who for who, state in states.items() if state != most)
    return f"{others} had another state than the other ranks after {record.step_name(first)} of attempt {attempt}"
