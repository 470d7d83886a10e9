"""The member ranks in each step of an attempt, reconstructed from the `regroup` events of its worker processes.

In an attempt without `regroup` events, all ranks trained all steps. Otherwise, all `regroup` events with the same
number become one `MemberChange`: the new members, the members that were lost or joined, and the members whose gradients
the step lacks. A worker keeps its member number for the whole attempt. A membership is the set of members between two
changes.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from holdfast.audit.rank_session import RankSession
from holdfast.audit.step_columns import Numbers
from holdfast.events import Regroup
from holdfast.finding import CannotTell
from holdfast.runs.config import REPLACING
from holdfast.sampler.run_plan import RunPlan

STRATEGIES = ("replay", "partial", "forward", "skip")
_MOST_MEMBERS = 1 << 20  # a damaged history may name any world size
_ALIKE = ("step", "strategy", "members", "kept", "redone", "behind", "asleep")  # fields that all declarations share


class Declaration(NamedTuple):
    """A `regroup` event, written by a worker process after workers were lost or joined, and its steps from then on."""

    session: RankSession  # all events of that process
    regroup: Regroup
    rows: range  # the indices of its steps from this `regroup` event to the next


class MemberExit(NamedTuple):
    """A worker that was lost or suspended, and the events of its process (`session`; None if they are not known)."""

    member: int
    session: RankSession | None


class Join(NamedTuple):
    """A worker that joined while others trained, the events of its process (None if not known), and its first step."""

    member: int
    session: RankSession | None
    first_step: int


class MemberChange(NamedTuple):
    """A change of the members (the workers that train together): when it happened, and which workers left or joined."""

    number: int  # of the new group
    step: int
    first_step: int  # the first step whose samples are split among `members`
    within: bool  # it happened during `step`, not just before
    strategy: str
    members: Sequence[int]
    lost: Sequence[MemberExit] = ()
    asleep: Sequence[MemberExit] = ()  # members that were suspended
    joined: Sequence[Join] = ()
    is_complete: bool = False  # every all-reduce of `step` kept the gradients of the members lost in it
    lacking: frozenset[int] = frozenset()  # members whose gradients the result of `step` lacks
    kept: frozenset[int] = frozenset()  # lost members whose gradients it includes
    missing: frozenset[int] = frozenset()  # samples of `step` that any member declared missing
    split: Sequence[int] = ()  # the members among which the samples of `step` were divided
    declarations: Sequence[Declaration] = ()


class Memberships:
    """The ranks that took part in each step of an attempt, reconstructed from the recorded `regroup` events.

    `errors` has a message for each `regroup` event that is impossible or contradicts another one."""

    def __init__(self, attempt: int, world: int, sessions: Sequence[RankSession], plan: RunPlan | None) -> None:
        self.attempt, self.world, self.sessions = attempt, world, sessions
        self.errors: list[str] = []
        self.changes: list[MemberChange] = []
        self.is_live = any(session.regroups for session in sessions)  # members changed while the others continued
        # Pairs of a step and the members that share the samples from that step on.
        self._splits: list[tuple[int, Sequence[int]]] = [(0, range(world))]
        if plan and self.is_live:
            self._add_changes(plan)

    @property
    def members(self) -> Sequence[int]:
        """The ranks that took part at the end of the attempt."""
        return self.changes[-1].members if self.changes else range(self.world)

    @cached_property
    def lost(self) -> Sequence[tuple[MemberChange, MemberExit]]:
        """Pairs (change of the members, worker that was lost in it), in the order of the changes."""
        return [(change, loss) for change in self.changes for loss in change.lost]

    @cached_property
    def missing(self) -> Mapping[int, frozenset[int]]:
        """The samples that are recorded as not trained, by step; a step that lacks no samples is left out."""
        missing: dict[int, frozenset[int]] = {}
        for change in self.changes:
            if change.missing:
                missing[change.step] = missing.get(change.step, frozenset()) | change.missing
        return missing

    @cached_property
    def skipped(self) -> frozenset[int]:
        """The steps that are recorded as skipped: their gradients were discarded."""
        return frozenset(change.step for change in self.changes if change.missing and change.strategy == "skip")

    @cached_property
    def perturbed(self) -> frozenset[int]:
        """The steps whose state is not that of an undisturbed run, because a lost shard came back with older values."""
        return frozenset(change.step for change in self.changes if change.lost and change.strategy == "partial")

    def split(self, step: int) -> Sequence[int]:
        """Return the ranks that shared the samples of `step`."""
        return self._splits[bisect_right(self._splits, step, key=lambda split: split[0]) - 1][1]

    def one_step_per_split(self, steps: Numbers) -> list[int]:
        """Return the first of `steps` in each period between two changes of the members."""
        first_steps = [first for first, _ in self._splits]
        _, rows = np.unique(np.searchsorted(first_steps, steps, side="right"), return_index=True)
        return [int(steps[row]) for row in rows]

    def due(self, member: int, steps: Numbers) -> Numbers:
        """Return the steps, out of `steps`, that the rank `member` must have recorded in the history."""
        if not self.is_live:
            return steps if member in self.members else steps[:0]
        takes_part = np.array([member in members for _, members in self._splits])
        first_steps = [first for first, _ in self._splits]
        due: Numbers = steps[takes_part[np.searchsorted(first_steps, steps, side="right") - 1]]
        left: Numbers = due[~np.isin(due, list(self._excused.get(member, ())))]
        return left

    def is_excused(self, member: int, step: int) -> bool:
        """Return True if the rank `member` was lost before it could write its event for `step`."""
        return step in self._excused.get(member, ())

    @cached_property
    def _excused(self) -> Mapping[int, set[int]]:
        """Steps that each lost rank may have left unrecorded, because a rank records a step during the next step."""
        excused: defaultdict[int, set[int]] = defaultdict(set)
        for change in self.changes:
            for member, session in change.lost:
                excused[member].add(change.step - 1)
                if session and session.recover and session.reached == change.step - 2:
                    excused[member].add(change.step - 2)
                if change.within and (change.is_complete or change.step in self.missing):
                    excused[member].add(change.step)
            for join in change.joined:
                if join.session and join.first_step == change.step:
                    excused[join.member].discard(change.step)
        return excused

    def unreported(self, steps: Numbers) -> int:
        """Return how many events of `steps` are absent because a worker was lost after its gradients had been used."""
        pairs = {(member, step) for member, excused in self._excused.items() for step in excused} - self.lacking
        for session in self.sessions:
            reported = np.intersect1d(session.steps.step, list(self._excused.get(session.rank, ()))).tolist()
            pairs -= {(session.rank, step) for step in reported if step != self.void_step(session)}
        counted = {*np.intersect1d(steps, [step for _, step in pairs]).tolist()} - self.skipped
        return sum(step in counted and member in self.split(step) for member, step in pairs)

    @cached_property
    def lacking(self) -> set[tuple[int, int]]:
        """Pairs (rank, step): the step was finished without the gradients of that rank. Skipped steps are left out."""
        return {(m, e.step) for e in self.changes if e.step not in self.skipped and e.missing for m in e.lacking}

    def void_step(self, session: RankSession) -> int | None:
        """Return the last step of `session` if its gradients were discarded when the process was lost, else None."""
        return self._void_steps.get(id(session))

    @cached_property
    def _void_steps(self) -> Mapping[int, int]:
        steps: dict[int, int] = {}
        incomplete = {e.step: e.number for e in self.changes if e.within and not e.is_complete}
        for change in self.changes:
            for _, session in (*change.lost, *change.asleep):
                was_reported = session and change.within and session.steps.last == change.step
                if was_reported and incomplete.get(change.step, -1) >= change.number:
                    steps[id(session)] = change.step
        return steps

    def world_sizes_of_save(self, step: int) -> set[int]:
        """Return the possible world sizes of the snapshot of `step`: more than one if members changed at that step."""
        sizes = [(0, self.world), *((change.step, len(change.members)) for change in self.changes)]
        before = [size for at, size in sizes if at < step or at == 0]
        return {before[-1], *(size for at, size in sizes if at == step)}

    def variations(self) -> Iterator[tuple[int, object]]:
        """Yield (first step, key) for each range of steps with the same members, untrained samples and older shards.

        The results of a step in two attempts should be bitwise equal only if the step has equal keys in both."""
        values: dict[int, object] = {}
        for first, members in self._splits:
            is_whole = len(members) == self.world
            values[first] = self.world if is_whole else (self.world, tuple(members), self.attempt, first)
        firsts = [first for first, _ in self._splits]
        changed = self.perturbed.union(self.missing)
        usual = {step: values[firsts[bisect_right(firsts, step) - 1]] for step in changed}
        for step in sorted(changed):
            values.setdefault(step + 1, usual[step])
            values[step] = ("lossy", self.attempt, step)
        return iter(sorted(values.items(), key=lambda item: item[0]))

    def _add_changes(self, plan: RunPlan) -> None:
        if self.world > _MOST_MEMBERS:
            raise CannotTell(f"attempt {self.attempt} claims to have {self.world} members")
        waiting: defaultdict[int, deque[RankSession]] = defaultdict(deque)
        declared: defaultdict[int, list[Declaration]] = defaultdict(list)
        for session in self.sessions:
            if not (
                session.is_idle and waiting[session.rank]
            ):  # a process that ended before it joined was not a member
                waiting[session.rank].append(session)
            starts = [row for _, row in session.regroups]
            for (regroup, start), end in zip(session.regroups, [*starts[1:], len(session.steps)], strict=False):
                declared[regroup.number].append(Declaration(session, regroup, range(start, end)))
        current = {member: sessions.popleft() for member, sessions in waiting.items()}
        departures: defaultdict[int, list[int]] = defaultdict(list)  # membership numbers, by member
        for number in sorted(declared):
            for member in (*declared[number][0].regroup.lost, *declared[number][0].regroup.asleep):
                departures[member].append(number)
        for number in sorted(declared):
            if error := self._wrong_declarations(declared[number], plan):
                self.errors.append(error)
            else:
                self._add_change(declared[number], current, waiting, departures)

    def _wrong_declarations(self, declarations: Sequence[Declaration], plan: RunPlan) -> str | None:
        first, *others = declarations
        for other in others:
            for name in _ALIKE:
                mine, theirs = getattr(first.regroup, name), getattr(other.regroup, name)
                if mine != theirs:
                    who = f"{first.session.who} and {other.session.who}"
                    return f"{who} disagree about {name} of membership {first.regroup.number} ({mine}, {theirs})"
        regroup, members = first.regroup, first.regroup.members
        name = f"membership {regroup.number} of attempt {self.attempt}"
        if regroup.strategy not in STRATEGIES:
            return f"{name} has the unknown strategy {regroup.strategy!r:.20}"
        if not members or list(members) != sorted({*members}) or members[-1] >= self.world:
            return f"{name} cannot have {names(members)} in a world of {self.world}"
        if not 0 <= regroup.step < plan.steps or (self.changes and regroup.step < self.changes[-1].step):
            return f"{name} cannot have changed in step {regroup.step}"
        if self.changes and _joins_a_begun_step(self.changes[-1].declarations[0].regroup, regroup):
            return f"{name} lets a worker join before step {regroup.step}, whose gradients were being reduced"
        return None

    def _add_change(
        self,
        declarations: Sequence[Declaration],
        current: dict[int, RankSession],
        waiting: Mapping[int, deque[RankSession]],
        departures: Mapping[int, Sequence[int]],
    ) -> None:
        regroup, before = declarations[0].regroup, self.members
        step, members, split = regroup.step, tuple(regroup.members), self.split(regroup.step)
        within = _is_within(declarations, split)
        first_step = step + within
        asleep = sorted({*regroup.asleep} & {*before})
        lost = sorted({m for declaration in declarations for m in declaration.regroup.lost if m in before} - {*asleep})
        if gone := {*before} - {*members, *lost, *asleep}:
            name = f"membership {regroup.number} of attempt {self.attempt}"
            self.errors.append(f"{names(sorted(gone))} left in {name} without being declared lost")
        while self._splits and self._splits[-1][0] >= first_step:
            self._splits.pop()
        self._splits.append((first_step, members))
        left = {member: MemberExit(member, current.pop(member, None)) for member in (*lost, *asleep)}
        joined: list[Join] = []
        for member in members:
            if member not in before or member in left:
                session = _joining_session(waiting.get(member), regroup.number, departures.get(member, ()))
                if session:
                    current[member] = session
                joined.append(Join(member, session, step if member in self.split(step) else step + 1))
        change = MemberChange(
            number=regroup.number,
            step=step,
            first_step=first_step,
            within=within,
            strategy=regroup.strategy,
            members=members,
            lost=[left[member] for member in lost],
            asleep=[left[member] for member in asleep],
            joined=joined,
            is_complete=regroup.kept > 0 and regroup.redone == 0,
            missing=frozenset(sample for declaration in declarations for sample in declaration.regroup.missing),
            split=split,
            declarations=declarations,
        )
        self.changes.append(_with_losses(self.changes[-1] if self.changes else None, change))


def missing_samples(plan: RunPlan, change: MemberChange) -> list[int]:
    """Return the samples that were left untrained in the step of `change` because members were lost."""
    if change.strategy == "skip" and change.lacking:
        return [*map(int, plan.window(change.step))]
    if len(change.split) > plan.batch(change.step):
        return []
    return [
        sample
        for member in sorted(change.lacking)
        for sample in plan.share(change.step, change.split.index(member), len(change.split)).tolist()
    ]


def names(members: Sequence[int]) -> str:
    """Return the ranks `members` as text, for example "members 0, 3"; at most the first eight are named."""
    some = [str(member) for member in islice(members, 8)]
    if not some:
        return "no member"
    return f"member{'s' * (len(members) > 1)} {', '.join(some)}{' and more' if len(members) > len(some) else ''}"


def _with_losses(before: MemberChange | None, change: MemberChange) -> MemberChange:
    lacking, kept = frozenset[int](), frozenset[int]()
    if before and before.step == change.step:
        lacking, kept = before.lacking, before.kept
    if not change.within:
        return change._replace(lacking=lacking, kept=kept)
    gone = kept | {loss.member for loss in change.lost if loss.member in change.split}
    replaced = {join.member for join in change.joined if join.session and join.first_step == change.step}
    if change.is_complete:
        return change._replace(lacking=lacking, kept=gone)
    if change.strategy in REPLACING or (gone and gone <= replaced):
        return change._replace(lacking=lacking)
    # Gradients that earlier changes of this step kept are lost with the last member that had them.
    return change._replace(lacking=lacking | gone)


def _joins_a_begun_step(before: Regroup, after: Regroup) -> bool:
    """Return True if a worker joined before a step whose backward pass had begun in the membership `before`.

    A worker may join during a backward pass, but then its change of the members counts gradient buckets. It can also
    join before the backward pass, if the members that had begun it were lost."""
    stayed = {*before.members} <= {*after.members} - {*after.lost, *after.asleep}
    has_joiners = len(after.members) > len(before.members)
    had_begun, is_in_backward = before.kept or before.redone, after.kept or after.redone
    return bool(before.step == after.step and stayed and has_joiners and had_begun and not is_in_backward)


def _joining_session(sessions: deque[RankSession] | None, number: int, departures: Sequence[int]) -> RankSession | None:
    """Remove and return the first of `sessions` if its process joined at member change `number`, else return None.

    `sessions` are the processes of one rank, oldest first. `departures` are the numbers of the changes that lost or
    suspended this rank."""
    if not sessions:
        return None
    joined_as = number if sessions[0].joined_as is None else sessions[0].joined_as
    place = bisect_right(departures, number)
    next_departure = departures[place] if place < len(departures) else None
    if number <= joined_as and (next_departure is None or joined_as < next_departure):
        return sessions.popleft()
    return None


def _is_within(declarations: Sequence[Declaration], split: Sequence[int]) -> bool:
    """Return True if the members changed during a step, and not between two steps.

    `declarations` are the `regroup` events of this change. `split` are the ranks that shared the samples of the step
    before the change."""
    regroup = declarations[0].regroup
    if regroup.missing or regroup.kept or regroup.redone:
        return True
    placements: list[tuple[int, tuple[int, int]]] = []  # members, with the rank and world size that finished the step
    for session, _, rows in declarations:
        finished = np.flatnonzero(session.steps.step[rows.start : rows.stop] == regroup.step)
        if len(finished):
            placements.append((session.rank, session.placement(rows.start + int(finished[0]))))

    def fits(members: Sequence[int]) -> bool:
        return all(member in members and place == (members.index(member), len(members)) for member, place in placements)

    return not fits(regroup.members) and fits(split)
