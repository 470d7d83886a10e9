"""Audit checks of the samples: every step of the plan was trained once, by all ranks, with exactly its samples.

The samples of a step are a window of the shuffled data set, and each rank trains a part of the window, its share. The
recorded digests of the shares are compared with the plan. Only shares that differ are analysed further.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from holdfast.audit.history_checks import leftover
from holdfast.audit.rank_session import RankSession
from holdfast.audit.recorded_orders import RecordedOrders
from holdfast.audit.run_record import RunRecord, ShareReport
from holdfast.audit.step_columns import Numbers
from holdfast.audit.step_sets import common, distinct, twice_in, union, without
from holdfast.finding import SHOWN, CannotTell, Verdict, counted
from holdfast.history.panel import BLOCK
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import Position, SamplePlan
from holdfast.sampler.run_plan import RunPlan

_IDS_AT_ONCE = 1 << 14  # intermediate results stay in the processor's cache
_LARGEST_WINDOW = 1 << 28  # samples of one step that are computed: a damaged plan may have any number
PROVED = 32  # one in 32 blocks of folded samples is computed again
_EPOCHS_SEARCHED = 10_000  # for a window at the same position of another epoch


def every_step_follows_the_last(record: RunRecord) -> tuple[Verdict, str]:
    """Check that steps follow each other without a gap, and that a step is trained again only after a rollback."""
    for sessions in record.attempts.values():
        for session in sessions:
            if error := _jump(record.sample_plan, session):
                return "fail", f"{session.who} in attempt {session.attempt} {error}"
    if not record.trained:
        return "unknown", "no step was trained that counts"
    if error := _jump_between_attempts(record):
        return "fail", error
    last, plan = max(int(steps[-1]) for steps in record.trained.values()), record.sample_plan
    return "pass", f"{counted(last + 1, 'step')} from {plan.position(0)} to {plan.position(last)}"


def _jump(plan: RunPlan, session: RankSession) -> str | None:
    steps, epochs, cursors = session.steps.step, session.steps.epoch, session.steps.cursor
    if not len(steps):
        return None
    if steps[0] != session.first_step:
        return f"began with {_row_text(session, 0)} instead of step {session.first_step}"
    planned_epochs, planned_cursors = plan.positions(steps)
    wrong = (np.diff(steps, prepend=steps[0] - 1) != 1) | (epochs != planned_epochs) | (cursors != planned_cursors)
    if not wrong.any():
        return None
    row = int(wrong.argmax())
    now = _row_text(session, row)
    return f"went from {_row_text(session, row - 1)} to {now}" if row else f"began with {now}"


def _jump_between_attempts(record: RunRecord) -> str | None:
    steps = np.sort(np.concatenate(list(record.trained.values())))
    if len(repeated := steps[1:][steps[1:] == steps[:-1]]):
        one, other, *_ = (attempt for attempt, attempt_steps in record.trained.items() if repeated[0] in attempt_steps)
        position = record.sample_plan.position(int(repeated[0]))
        return f"{position} was trained in attempt {one} and in attempt {other}, and neither was rolled back"
    if steps[0]:
        return f"the run starts at {record.step_name(int(steps[0]))}"
    gaps = np.flatnonzero(np.diff(steps) != 1)
    if not len(gaps):
        return None
    before, after = int(steps[gaps[0]]), int(steps[gaps[0] + 1])
    return f"the run went from {record.step_name(before)} to {record.step_name(after)}"


def all_ranks_report_every_step(record: RunRecord) -> tuple[Verdict, str]:
    """Check that every committed step was recorded by all ranks that took part in it."""
    complete = 0
    for attempt, steps in record.trained.items():
        reported, memberships = _reported_steps(record, attempt), record.memberships(attempt)
        committed = steps[steps < record.lineage.committed]
        for rank in range(min(record.world(attempt), len(reported) + 1)):
            lacking = without(memberships.due(rank, committed), reported.get(rank, steps[:0]))
            if len(lacking):
                if f"rank-{rank}" not in record.sessions:
                    world = record.world(attempt)
                    raise CannotTell(f"there is no history of rank-{rank}, one of {world} in attempt {attempt}")
                return "fail", f"rank-{rank} never reported {record.step_name(int(lacking[0]))}, which was committed"
        complete += len(_complete_steps(record, attempt))
    if not complete:
        return "unknown", "no step was reported by all ranks of its world"
    return "pass", f"{counted(complete, 'step')} reported by all ranks of their world"


def _reported_steps(record: RunRecord, attempt: int) -> dict[int, Numbers]:
    """Return the steps that each rank recorded in `attempt`, by rank, without steps that were rolled back."""
    reported: dict[int, Numbers] = {}
    world = record.world(attempt)
    for session in record.attempts[attempt]:
        if session.rank < world:
            steps = record.counted_steps(session)
            reported[session.rank] = union([reported.get(session.rank, steps[:0]), steps])
    return reported


def _complete_steps(record: RunRecord, attempt: int) -> Numbers:
    """Return the steps of `attempt` that all participating ranks have recorded, without steps that were rolled back."""
    reported, memberships = _reported_steps(record, attempt), record.memberships(attempt)
    steps = record.trained[attempt]
    if len(reported) < record.world(attempt):
        return steps[:0]
    for rank, mine in reported.items():
        due = memberships.due(rank, steps)
        if len(due) != len(mine) or not np.array_equal(due, mine):
            steps = without(steps, without(due, mine))
    return steps


def every_sample_trained_once(record: RunRecord) -> tuple[Verdict, str]:
    """Check that each rank trained exactly its planned samples in every step that was not rolled back."""
    defects = _find_defects(record)
    if defects:
        return "fail", _describe(record, defects)
    if not defects.compared:
        return "unknown", "no step was reported by all ranks of its world"
    steps, phases = counted(defects.compared, "step"), record.sample_plan.phases
    batch = phases[0].batch
    unfinished = counted(defects.unfinished, "step")
    rest = f"; {unfinished} not reported by all ranks or not committed yet" if defects.unfinished else ""
    if any(plan.loader for _, plan in record.plans):
        batches = f"{batch} batch{'es' * (batch != 1)}"
        return "pass", f"{steps} of {batches}, as many as planned; the loader chooses its samples: not checked{rest}"
    sizes = dict.fromkeys(phase.batch for phase in phases)
    of_samples = f"{steps} of {' or '.join(counted(size, 'sample') for size in sizes)}"
    if any(plan.own or any(phase.get("own") for phase in plan.later_phases) for _, plan in record.plans):
        return "pass", (
            f"{of_samples}, each drawn once: as many as planned. The same samples are drawn again after a failure if the "
            f"script drew from the global generators; which samples it drew is not checked{rest}"
        )
    groups = sorted({record.tensor_parallel(attempt) for attempt in record.trained} - {1})
    rest += f"; each by a tensor-parallel group of {' or '.join(map(str, groups))} ranks" if groups else ""
    missing = sum(
        len(samples)
        for memberships in record.live_attempts
        for step, samples in memberships.missing.items()
        if step in record.trained.get(memberships.attempt, ())
    )
    once = f"every sample exactly once but {missing} declared missing" if missing else "none repeated, missing or extra"
    if record.orders:
        once = f"those that the sampler returned, in its order{f', but {missing} declared missing' if missing else ''}"
    left = leftover(record.sample_plan)
    return "pass", f"{of_samples}: {once}{f'; {left}' if left else ''}{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defects:
    """The steps that were not trained as planned, and how many steps were compared and how many are unfinished."""

    missing: Sequence[range]
    duplicated: Sequence[int]
    extra: Sequence[int]
    changed: Sequence[int]
    compared: int
    unfinished: int  # steps neither recorded by all ranks nor committed: the next attempt would train them again

    def __bool__(self) -> bool:
        return bool(self.missing or self.duplicated or self.extra or self.changed)


def _find_defects(record: RunRecord) -> _Defects:
    steps, committed = record.sample_plan.steps, record.lineage.committed
    none = np.zeros(0, np.int64)
    trained = np.concatenate([*record.trained.values(), none])
    complete = np.concatenate([*(_complete_steps(record, attempt) for attempt in record.trained), none])
    duplicated = _duplicated(record)
    complete = distinct(complete)
    inside = distinct(trained[trained < steps])
    partly = without(inside[inside < committed], complete)
    if len(partly) and (absent := next(filter(None, map(record.absent_ranks, record.trained)), None)):
        raise CannotTell(f"there is no history of {', '.join(absent)}")
    reached = int(inside[-1]) if len(inside) else -1
    ends = np.concatenate([[-1], inside, [max(min(committed, steps), reached + 1)]])
    return _Defects(
        missing=[range(int(ends[gap]) + 1, int(ends[gap + 1])) for gap in np.flatnonzero(np.diff(ends) > 1)],
        duplicated=duplicated,
        extra=distinct(trained[trained >= steps]).tolist(),
        changed=sorted({*_steps_with_other_samples(record), *partly.tolist()} - set(duplicated)),
        compared=int((complete < steps).sum()),
        unfinished=len(without(inside[inside >= committed], complete)),
    )


def _duplicated(record: RunRecord) -> list[int]:
    """Return the steps that were trained twice, by one rank or in two attempts, without a rollback in between."""
    found = list(record.trained.values())
    for attempt in record.trained:
        by_rank: defaultdict[int, list[Numbers]] = defaultdict(list)
        for session in record.attempts[attempt]:
            by_rank[session.rank].append(record.counted_steps(session))
        found += [twice_in(np.concatenate(steps)) for steps in by_rank.values() for _ in range(2)]
    return [] if not found else twice_in(np.concatenate(found)).tolist()


def _steps_with_other_samples(record: RunRecord) -> Iterator[int]:
    """Yield the steps in which a rank recorded other samples than planned; a step may be yielded more than once."""
    plan = record.sample_plan
    if (largest := max(phase.batch for phase in plan.phases)) > _LARGEST_WINDOW:
        raise CannotTell(f"steps of {largest} samples are too large to be computed")
    for attempt, steps in record.trained.items():
        reports = [_ReportedShares(session, _unproved(plan, session, record)) for session in record.attempts[attempt]]
        left = distinct(np.concatenate([report.steps for report in reports]))
        for phase, chunk, windows in _windows(plan, common(left, steps[steps < plan.steps])):
            for report in reports:
                yield from report.differing(phase, chunk, windows)


def _unproved(plan: RunPlan, session: RankSession, record: RunRecord) -> Numbers:
    """Return the counted rows of `session` whose samples must be computed: not those that were compared when folded.

    Of these, only some are computed again."""
    rows = record.counted_rows(session)
    is_left = np.ones(len(session.steps), bool)
    for planned, run in session.steps.planned_rows(plan):
        share = run.rank // run.tensor_parallel, run.panel.world // run.tensor_parallel
        if session.placement(planned.start) == share and run.tensor_parallel == session.tensor_parallel:
            is_left[planned.start : planned.stop] = False
            for block in range((7 * run.rank) % PROVED, run.panel.rows[run.row].steps // BLOCK, PROVED):
                run.prove(block)
    return rows[is_left[rows]]


class _ReportedShares:
    """The samples that one worker process recorded for the steps at the indices `rows`, sorted by step."""

    def __init__(self, session: RankSession, rows: Numbers) -> None:
        order = rows[np.argsort(session.steps.step[rows], kind="stable")]
        self._placements = list(session.placements())
        self._rows, self.steps, self._count = order, session.steps.step[order], session.steps.count[order]
        self._digest = np.zeros((len(order), 2), np.uint64)
        self._digest[np.argsort(order, kind="stable")] = session.steps.digests(np.sort(order))

    def differing(self, plan: SamplePlan, chunk: Numbers, windows: Numbers) -> Iterator[int]:
        """Yield the steps in `chunk` where this process trained other samples than `plan` has for its rank.

        `chunk` is an array of steps. Row i of `windows` has the sample ids that all ranks together should train in step
        `chunk[i]`."""
        first, last = np.searchsorted(self.steps, [chunk[0], chunk[-1] + 1])
        for rows, share, shares in self._placements:
            is_inside = (self._rows[first:last] >= rows.start) & (self._rows[first:last] < rows.stop)
            mine = np.arange(first, last)[is_inside]
            steps = self.steps[mine]
            if not share < shares <= plan.batch:
                yield from steps.tolist()
                continue
            places = plan.places(share, shares)
            planned = Samples.sums(windows[np.searchsorted(chunk, steps), places.start : places.stop])
            wrong = (self._digest[mine] != planned).any(axis=1) | (self._count[mine] != len(places))
            yield from steps[wrong].tolist()


def _windows(plan: RunPlan, steps: Numbers) -> Iterator[tuple[SamplePlan, Numbers, Numbers]]:
    """Divide `steps` into chunks, and yield (phase of the plan, chunk, sample ids) for each.

    Row i of the sample ids has the samples that are planned for step `chunk[i]`."""
    for first, phase in zip(plan.first_steps, plan.phases, strict=True):
        own = steps[(steps >= first) & (steps < first + phase.steps)]
        size = max(1, _IDS_AT_ONCE // phase.batch)
        for start in range(0, len(own), size):
            chunk = own[start : start + size]
            yield phase, chunk, phase.windows(chunk - first)


def _describe(record: RunRecord, defects: _Defects) -> str:
    gaps = [(record.step_name(gap[0]), record.step_name(gap[-1])) for gap in defects.missing[: SHOWN + 1]]
    missing = [first if first == last else f"{first} to {last}" for first, last in gaps]
    duplicated = [_twice(record, step) for step in defects.duplicated[: SHOWN + 1]]
    extra = [f"{record.step_name(step)} is not in the plan" for step in defects.extra[: SHOWN + 1]]
    changed = _wrong_step_texts(record, defects.changed[: SHOWN + 1])
    parts: list[str] = []
    for count, kind, texts in (
        (sum(map(len, defects.missing)), "missing", missing),
        (len(defects.duplicated), "duplicated", duplicated),
        (len(defects.extra), "extra", extra),
        (len(defects.changed), "with other samples", changed),
    ):
        more = ["and more"] if len(texts) > SHOWN else []
        parts += [f"{counted(count, 'step')} {kind}: {', '.join([*texts[:SHOWN], *more])}"] if texts else []
    return "; ".join(parts)


class _Share(NamedTuple):
    number: int
    shares: int
    samples: Samples


def _wrong_step_texts(record: RunRecord, steps: Sequence[int]) -> list[str]:
    if not steps:
        return []
    plan = record.sample_plan
    reports = {step: record.reports(step) for step in steps}
    wrong = {step: _wrong_shares(plan, step, reports[step]) for step in steps}
    wanted = {share for shares in wrong.values() for share in shares} | {_whole(reports[step]) for step in steps}
    same_cursor = (_same_cursor(plan, step) for step in steps)
    candidates = np.unique(np.concatenate([*record.trained.values(), *same_cursor]))
    elsewhere = _find_planned(plan, candidates[candidates < plan.steps], wanted)
    texts: list[str] = []
    for step in steps:
        attempt = reports[step][0].attempt
        position, memberships = plan.position(step), record.memberships(attempt)
        if (other := elsewhere.get(_whole(reports[step]))) not in (None, position):
            texts.append(f"{record.step_name(step)}: {other} was trained instead")
            continue
        reporters = {report.who for report in reports[step]}
        due = (f"rank-{member}" for member in memberships.split(step) if not memberships.is_excused(member, step))
        errors = [f"{who} never reported it" for who in islice((who for who in due if who not in reporters), SHOWN)]
        group = record.tensor_parallel(attempt)
        errors += [f"{who} {_wrong_share_text(plan, step, s, elsewhere, group)}" for s, who in wrong[step].items()]
        reason = ", ".join(errors) or "trained by a rank that is not of its world"
        texts.append(f"{record.step_name(step)}: {reason}")
    return texts


def _same_cursor(plan: RunPlan, step: int) -> list[int]:
    """Return the step of every epoch that has the same index in its epoch as `step`.

    If `step` trained wrong samples, they may be the samples of such a step."""
    phase, local = plan.phase(step)
    cursor = local % phase.steps_per_epoch
    known = (
        phase.orders.epochs if isinstance(phase.orders, RecordedOrders) else range(min(phase.epochs, _EPOCHS_SEARCHED))
    )
    steps = (epoch * phase.steps_per_epoch + cursor for epoch in known)
    return [step - local + other for other in steps if other < phase.steps]


def _wrong_shares(plan: RunPlan, step: int, reports: Iterable[ShareReport]) -> dict[_Share, str]:
    shares = {_Share(report.share, report.shares, report.samples): report.who for report in reports}
    valid = {share: who for share, who in shares.items() if share.number < share.shares <= plan.batch(step)}
    return {s: who for s, who in valid.items() if s.samples != Samples.of(plan.share(step, s.number, s.shares))}


def _whole(reports: Sequence[ShareReport]) -> _Share:
    shares = {_Share(report.share, report.shares, report.samples) for report in reports}  # of a group, one
    return _Share(0, 1, Samples.total(share.samples for share in shares))


def _find_planned(plan: RunPlan, steps: Numbers, wanted: set[_Share]) -> dict[_Share, Position]:
    """Search the plan of `steps` for the `wanted` shares (one rank's samples in a step), and return their positions."""
    parts = {share[:2] for share in wanted}
    found: dict[_Share, Position] = {}
    for phase, chunk, windows in _windows(plan, steps):
        for number, count in (part for part in parts if part[1] <= phase.batch):
            columns = phase.places(number, count)
            shares = Samples.of_each(windows[:, columns.start : columns.stop])
            for step, samples in zip(chunk.tolist(), shares, strict=True):
                if (share := _Share(number, count, samples)) in wanted:
                    found[share] = plan.position(step)
    return found


def _wrong_share_text(
    plan: RunPlan, step: int, share: _Share, elsewhere: Mapping[_Share, Position], tensor_parallel: int
) -> str:
    for number in range(share.shares):
        if share.samples == Samples.of(plan.share(step, number, share.shares)):
            return f"trained the share of rank-{number * tensor_parallel}"
    if other := elsewhere.get(share):
        return f"trained the share of {other} instead"
    ids = plan.share(step, share.number, share.shares)
    planned, trained = Samples.of(ids), share.samples
    if trained.count != planned.count:
        difference = planned - trained if trained.count < planned.count else trained - planned
        which = "" if difference.only_id is None else f" (sample {difference.only_id})"
        if trained.count < planned.count:
            return f"trained {trained.count} of its {planned.count} samples, {difference.count} missing{which}"
        return f"trained {trained.count} samples instead of {planned.count}, {difference.count} extra{which}"
    for lost, alone in zip(ids.tolist(), Samples.of_each(ids[:, None]), strict=True):
        if (sample := (trained + alone - planned).only_id) is not None:
            return f"trained sample {sample} instead of sample {lost}"
    return "trained other samples instead"


def _twice(record: RunRecord, step: int) -> str:
    reports = record.reports(step)
    attempts = sorted({report.attempt for report in reports})
    name = record.step_name(step)
    if len(attempts) > 1:
        return f"{name} in attempts {' and '.join(map(str, attempts))}"
    ranks = [report.who for report in reports]
    repeated = sorted({who for who in ranks if ranks.count(who) > 1})
    return f"{name} by {', '.join(repeated)} in attempt {attempts[0]}"


def _row_text(session: RankSession, row: int) -> str:
    columns = session.steps
    return f"epoch {columns.epoch[row]} cursor {columns.cursor[row]} (step {columns.step[row]})"
