"""Audit checks of the history (a run's event files): it is readable and complete, has one plan, and reaches the end."""

from itertools import islice, pairwise

from holdfast.audit.rank_session import RankSession
from holdfast.audit.run_record import RunRecord
from holdfast.events import Commit, Done, Launch, Plan, Stopped
from holdfast.finding import SHOWN, Verdict, counted
from holdfast.sampler.plan import LENGTH, SamplePlan
from holdfast.sampler.run_plan import RunPlan

# Fields of a plan that must stay the same in all attempts. The save settings may change, and a plan may become longer.
_FIXED = ("samples", "batch", "seed", "config", "own", "loader", "sampler")


def history_is_readable(record: RunRecord) -> tuple[Verdict, str]:
    """Check that every event has the fields of its kind, and is in the file of a process that writes such events."""
    if wrong := record.malformed + record.misplaced:
        more = ["and more"] if len(wrong) > SHOWN else []
        return "fail", f"{counted(len(wrong), 'line')} cannot be right: {'; '.join([*wrong[:SHOWN], *more])}"
    text = f"{counted(record.event_count, 'event')} of {counted(len(record.writers), 'writer')}"
    lines = [f"{torn.path.name} line {torn.line}, {torn.size} bytes" for torn in record.torn]
    left = f"; killed writers left {counted(len(lines), 'torn line')}: {'; '.join(lines)}" if lines else ""
    return ("pass" if record.event_count else "unknown"), text + left


def every_rank_has_a_history(record: RunRecord) -> tuple[Verdict, str]:
    """Check that every rank of each attempt (one start of all workers) has an event file.

    An attempt is left out if all of its steps were rolled back and none of its ranks recorded an end."""
    if not record.attempts:
        return "unknown", "there is no history of any rank"
    for attempt, sessions in record.attempts.items():
        matters = attempt in record.trained or any(session.end for session in sessions)
        if matters and (absent := record.absent_ranks(attempt)):
            lacking = f"{', '.join(absent)} of the {counted(record.world(attempt), 'rank')} of attempt {attempt}"
            return "unknown", (
                f"there is no history of {lacking}: bring its file back into history/ or, if it ran on another node, name "
                "the folder of that node with --node-folder"
            )
    return "pass", f"the histories of {counted(len(record.sessions), 'rank')}"


def every_start_is_an_attempt(record: RunRecord) -> tuple[Verdict, str]:
    """Check that each worker process begins a new attempt or joins a running one, and that its events are in order."""
    if not record.attempts:
        return "unknown", "the history has no attempt"
    for sessions in record.sessions.values():
        if error := next((session.error for session in sessions if session.error), None):
            return "fail", error
        for one, other in pairwise(session for session in sessions if session.attempt is not None):
            is_new = not (record.has_joined(other) or record.never_joined(other))
            if (other.attempt or 0) < (one.attempt or 0) + is_new:
                return "fail", f"{other.who} started attempt {other.attempt} after attempt {one.attempt}"
    for attempt, sessions in record.attempts.items():
        worlds = [(session, session.world) for session in sessions if session.world is not None]
        for session, world in worlds:
            first, first_world = worlds[0]
            if world != first_world:
                sizes = f"{first_world} for {first.who} and {world} for {session.who}"
                return "fail", f"attempt {attempt} had a world size of {sizes}"
            if session.rank >= world:
                return "fail", f"{session.who} took part in attempt {attempt}, which had {counted(world, 'rank')}"
    starts = sum(map(len, record.attempts.values()))
    return "pass", f"{counted(starts, 'start')} of a rank in {counted(len(record.attempts), 'attempt')}"


def one_plan(record: RunRecord) -> tuple[Verdict, str]:
    """Check that all ranks recorded the same training plan in every attempt: the same samples in the same order."""
    plan = record.sample_plan
    first, *others = record.plans
    errors = (_different_plans(first, other) for other in others)
    if error := next(filter(None, errors), None) or _wrong_length(record) or _different_seed(record):
        return "fail", error
    if wrong := next((orders.errors[0] for orders in record.orders if orders.errors), None):
        return "fail", wrong
    digests = [rank_plan.data for _, rank_plan in record.plans]
    if any(digests) and not all(digests):
        session = next(session for session, rank_plan in record.plans if rank_plan.data is None)
        return "unknown", f"{session.who} has no digest of its data in attempt {session.attempt}, but others have"
    if error := next(filter(None, (_wrong_groups(record, session) for session, _ in record.plans)), None):
        return "fail", error
    attempts = counted(len({session.attempt for session, _ in record.plans}), "attempt")
    is_drawn = any(
        recorded.own or any(later.get("own") for later in recorded.later_phases) for _, recorded in record.plans
    )
    lengths_of_phases = ", then ".join(map(_drawn_length_text if is_drawn else _length_text, plan.phases))
    parts = [f"{attempts} by one plan: {lengths_of_phases}"]
    lengths = list(dict.fromkeys(rank_plan.steps for _, rank_plan in record.plans))
    parts += [f"extended from {' to '.join(map(str, lengths))} steps"] if len(lengths) > 1 else []
    parts += list(filter(None, [leftover(plan)]))
    parts += [] if any(digests) else ["what the samples contain is not recorded"]
    changes = {launch.attempt: launch.changed for _, launch in record.launches if isinstance(launch, Launch)}
    for attempt, names in sorted(changes.items()):
        parts += [f"{', '.join(names)} changed in attempt {attempt} with --may-change"] if names else []
    return "pass", "; ".join(parts)


def _different_plans(one: tuple[RankSession, Plan], other: tuple[RankSession, Plan]) -> str | None:
    (a, first), (b, second) = one, other
    who = f"{a.who} in attempt {a.attempt} and {b.who} in attempt {b.attempt}"
    values = [(name, getattr(first, name), getattr(second, name)) for name in _FIXED]
    if differing := [f"{name} ({mine}, then {theirs})" for name, mine, theirs in values if mine != theirs]:
        return f"the plans of {who} differ in {', '.join(differing)}"
    last = min(len(first.later_phases), len(second.later_phases)) - 1
    for index, (mine, theirs) in enumerate(zip(first.later_phases, second.later_phases, strict=False)):
        free = LENGTH if index == last else ()  # a plan may become longer
        if wrong := [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name) and name not in free]:
            return f"the plans of {who} differ in {', '.join(wrong)} of phase {index + 2}"
    if first.data and second.data and first.data != second.data:
        return f"the data sets of {who} hold other samples: a split or shuffle before attach() without a seed?"
    return None


def _wrong_groups(record: RunRecord, session: RankSession) -> str | None:
    if session.plan is None or session.attempt is None:
        return None
    size, others = session.plan.tensor_parallel, record.tensor_parallel(session.attempt)
    groups = f"{session.who} has tensor-parallel groups of {counted(size, 'rank')} in attempt {session.attempt}"
    if size < 1 or (session.world or size) % size:
        return f"{groups}, which had {session.world}"
    return None if size == others else f"{groups}, and other ranks have groups of {others}"


def _length_text(phase: SamplePlan) -> str:
    epochs, samples, steps = counted(phase.epochs, "epoch"), counted(phase.batch, "sample"), phase.steps_per_epoch
    if phase.limit is None or phase.limit == phase.epochs * steps:
        return f"{epochs} of {counted(steps, 'step')} of {samples}"
    return f"{phase.limit} of the {counted(phase.epochs * steps, 'step')} of {epochs}, with {samples} a step"


def _drawn_length_text(phase: SamplePlan) -> str:
    """Return the length of a phase whose samples the script draws itself: it has no epochs."""
    return f"{counted(phase.steps, 'step')} of {counted(phase.batch, 'sample')}"


def _wrong_length(record: RunRecord) -> str | None:
    longest: tuple[RankSession, Plan] | None = None
    for session, plan in record.plans:
        steps = plan.steps
        if session.reached > steps:
            return f"{session.who} trained {session.reached} steps in attempt {session.attempt}, by a plan of {steps} steps"
        if isinstance(session.end, Stopped) and session.end.step >= steps:
            return f"{session.who} says in attempt {session.attempt} that its script stopped at the end of its plan, step {steps}"
        if longest is not None and steps != (before := longest[1].steps):
            first = longest[0]
            who = f"{first.who} in attempt {first.attempt} and {session.who} in attempt {session.attempt}"
            if steps < before or session.attempt == first.attempt:
                return f"the plans of {who} have {before} steps, then {steps}"
            if not plan.extends:
                return f"the plans of {who} grew from {before} steps to {steps} without --extend"
        if longest is None or steps > longest[1].steps:
            longest = session, plan
    return None


def _different_seed(record: RunRecord) -> str | None:
    sessions = (session for session in record.sessions.get("rank-0", ()) if session.commits or len(session.steps))
    first = next(sessions, None)
    if first is None or first.seed is None:
        return None
    for attempt, others in record.attempts.items():
        for session in others if attempt >= (first.attempt or 0) else ():
            if session.seed not in (None, first.seed):
                trained = f"attempt {first.attempt} trained with {first.seed}"
                return f"{session.who} began attempt {attempt} with the seed {session.seed}, but {trained}"
    return None


def leftover(plan: RunPlan) -> str:
    """Return a clause for a message: how many samples of each epoch do not fill a batch; "" if there are none."""
    return ", then ".join(filter(None, dict.fromkeys(map(_leftover, plan.phases))))


def _leftover(phase: SamplePlan) -> str:
    rest = phase.samples % phase.batch
    do, are = ("does", "is") if rest == 1 else ("do", "are")
    return (
        f"{counted(rest, 'sample')} of each epoch {do} not fill a batch and {are} left out of that epoch"
        if rest
        else ""
    )


def reached_the_end(record: RunRecord) -> tuple[Verdict, str]:
    """Check that all ranks trained and saved the run to its end: the last planned step, or where the script stopped."""
    end = record.sample_plan.steps
    for sessions in record.attempts.values():
        for session in sessions:
            planned = session.plan.steps if session.plan else end
            if isinstance(session.end, Done) and session.end.step != planned:
                step = f"step {session.end.step} of {planned}"
                return "fail", f"{session.who} was done at {step} in attempt {session.attempt}"
    if error := _wrong_stop(record):
        return "fail", error
    finished = [attempt for attempt in record.attempts if is_finished(record, attempt)]
    if error := _wrong_last_save(record, set(finished[:-1])):  # the last attempt is checked below
        return "fail", error
    last = max((attempt for attempt, steps in record.trained.items() if len(steps)), default=0)
    if finished and max(finished) >= last and record.lineage.committed == end:
        return "pass", f"all ranks were done at step {end} in attempt {max(finished)}"
    ends = (session.end for attempt in finished[-1:] for session in record.attempts[attempt])
    stop = next((last_event.step for last_event in ends if isinstance(last_event, Stopped)), None)
    if stop is not None and stop == record.lineage.committed:
        return "pass", f"stopped by the script at step {stop} of {end}, on all ranks, in attempt {max(finished)}"
    reached = 1 + max((int(steps[-1]) for steps in record.trained.values()), default=-1)
    progress = f"{counted(reached, 'step')} of {end} trained, {record.lineage.committed} of them committed"
    if finished and max(finished) == max(record.attempts):
        return "fail", f"all ranks were done in attempt {max(finished)}, with {progress}"
    if reached == end == record.lineage.committed:
        newest = max(record.attempts)
        done = {session.rank for session in record.attempts[newest] if isinstance(session.end, Done)}
        silent = (f"rank-{member}" for member in record.memberships(newest).members if member not in done)
        all_steps = f"all {counted(end, 'step')} were trained and committed"
        return "unknown", f"{all_steps}, but not every rank was done: {', '.join(islice(silent, SHOWN))} was not"
    return "unknown", f"the run did not reach its end: {progress}"


def is_finished(record: RunRecord, attempt: int) -> bool:
    """Return True if every rank that was not lost in `attempt` finished its training, or was stopped by the script."""
    ends = {s.rank for s in record.attempts.get(attempt, ()) if isinstance(s.end, Done | Stopped)}
    return bool(ends) and ends.issuperset(record.memberships(attempt).members)


def _wrong_stop(record: RunRecord) -> str | None:
    stop: tuple[int, int] | None = None  # the attempt and the step
    for attempt, sessions in record.attempts.items():
        extends = any(session.plan and session.plan.extends for session in sessions)
        if stop and not extends and any(s.reached > stop[1] for s in sessions if len(s.steps)):
            stopped_at = f"step {stop[1]} in attempt {stop[0]}"
            return f"the script stopped the run at {stopped_at}, but attempt {attempt} trained on"
        ends = {(type(s.end), s.end.step): s for s in sessions if isinstance(s.end, Done | Stopped)}
        if len(ends) > 1:
            one, other, *_ = ends.values()
            return f"{one.who} {_end_text(one)} in attempt {attempt}, but {other.who} {_end_text(other)}"
        stopped = [s.end.step for s in ends.values() if isinstance(s.end, Stopped)]
        stop = (attempt, stopped[0]) if stopped else None if extends else stop
    return None


def _end_text(session: RankSession) -> str:
    end = session.end
    if isinstance(end, Stopped):
        return f"{'was left by' if end.left else 'was stopped by'} its script at step {end.step}"
    return f"was done at step {end.step if end else session.reached}"


def _wrong_last_save(record: RunRecord, finished: set[int]) -> str | None:
    commits: dict[int, Commit] = {}  # the last commit of each step, up to and including the attempt
    for attempt, sessions in record.attempts.items():
        commits |= {commit.step: commit for session in sessions for commit in session.commits}
        ends = [(session.who, session.end) for session in sessions if isinstance(session.end, Done | Stopped)]
        for who, end in ends:  # a script that leaves its loop may do so after the save, which then has no mark
            if isinstance(end, Stopped) and not end.left and end.step in commits and not commits[end.step].stops:
                return (
                    f"{who} says that its script stopped the run at step {end.step} in attempt {attempt}, but the "
                    "snapshot that was saved there has no mark of a stop"
                )
        if attempt in finished and (unsaved := {end.step for _, end in ends} - commits.keys()):
            return f"attempt {attempt} ended at step {min(unsaved)}, which was never committed"
    return None
