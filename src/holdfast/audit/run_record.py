"""The events of a run, arranged for the audit checks: one session for each worker process, and events of supervisors.

A step counts unless a later restore rolled it back. Events of different ranks are ordered by attempt number, and within
an attempt by cause and effect: a snapshot is found, then restored, and later ones are saved. No timestamps are used.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from holdfast.audit.memberships import Join, Memberships
from holdfast.audit.rank_session import RankSession, named, with_article
from holdfast.audit.recorded_orders import RecordedOrders
from holdfast.audit.step_columns import Numbers, counting
from holdfast.audit.step_sets import union
from holdfast.errors import BadInput
from holdfast.events import (
    Commit,
    Corruption,
    Detect,
    Event,
    Judged,
    Launch,
    Malformed,
    Open,
    Other,
    Plan,
    Preempt,
    Recover,
    Restart,
    Scale,
    Straggler,
    Strike,
    What,
    rank_of,
)
from holdfast.finding import SHOWN, CannotTell, where
from holdfast.history.folded import StepRun
from holdfast.history.lineage import EVERY_STEP, Lineage
from holdfast.history.log import TornLine
from holdfast.runs.histories import RunFacts
from holdfast.sampler.digest import Samples
from holdfast.sampler.plan import SamplePlan
from holdfast.sampler.run_plan import RunPlan

_INJECTOR = re.compile(r"injected-(storage(-[1-9][0-9]{0,17})?|0|[1-9][0-9]{0,17})")
_LONGEST = 1 << 62  # steps before a phase: more would not fit the numbers of arrays
_SUPERVISOR = re.compile(r"supervisor(-[0-9]+)?")


class ShareReport(NamedTuple):
    """The number and the digest of the samples that one rank recorded for its share of one step."""

    who: str
    share: int  # the number of the part of the step's samples that the rank was to train
    shares: int
    attempt: int
    samples: Samples


class Restore(NamedTuple):
    """A restore by a worker process, and the commit of the restored snapshot (None if it was not committed by then)."""

    session: RankSession
    recover: Recover
    commit: Commit | None
    trainer: int | None  # the attempt that trained the last step of the snapshot
    is_abandoned: bool  # without a `commit`: it was once committed, and rolled back

    def __str__(self) -> str:
        step = self.recover.restored
        what = "nothing" if step is None else f"step {step}"
        return f"{self.session.who} restored {what} in attempt {self.recover.attempt}"


class CommittedSave(NamedTuple):
    """A commit of a snapshot, and the number of the attempt that trained its last step."""

    commit: Commit
    trainer: int | None


class RunRecord:
    """All events of a run, collected for an audit. The events of each writing process must be added in file order."""

    def __init__(
        self, history: Iterable[Event] = (), torn: Sequence[TornLine] = (), facts: RunFacts | None = None
    ) -> None:
        self.facts, self.torn = facts, torn
        self.recovery = facts.recovery if facts else None
        self.event_count = 0
        self.writers: set[str] = set()
        self.malformed: list[str] = []
        self.misplaced: list[str] = []  # events in a file, or of a type, that is not their writer's
        self.launches: list[tuple[str, Launch | Restart]] = []
        self.detects: list[tuple[str, Detect]] = []
        self.verdicts: list[Judged] = []
        self._supervisor_was_killed = self._supervisor_is_open = False
        self._sessions: dict[str, list[RankSession]] = {}
        for event in history:
            self.add(event)

    def add(self, event: Event, file: str | None = None) -> None:
        """Add the next event; `file` is the name of its history file, without the suffix `.jsonl`."""
        who, what = event.who, event.what
        self.event_count += 1
        self.writers.add(who)
        if file not in (None, who):
            self.misplaced.append(f"{file}.jsonl has a line of {who}")
        if isinstance(what, Malformed):
            self.malformed.append(f"{with_article(what.kind)} event of {who}{where(what, file)}: {what.why}")
        if (rank := rank_of(who)) is not None:
            if type(what) is Open:
                self._sessions.setdefault(who, []).append(RankSession(who, rank, what))
            elif who not in self._sessions:
                self._sessions[who] = [RankSession(who, rank, None)]
            if type(what) is not Open:
                self._sessions[who][-1].add(what)
        elif _SUPERVISOR.fullmatch(who):
            self._add_of_supervisor(who, what)
        elif isinstance(what, Strike) and _INJECTOR.fullmatch(who):
            pass
        elif not isinstance(what, Open | Other | Malformed):
            self.misplaced.append(f"{who} is not a rank or supervisor, but wrote {with_article(event.kind)} event")

    def add_run(self, run: StepRun, file: str | None = None) -> None:
        """Add folded steps, as if their events were added one by one."""
        sessions = self._sessions.get(run.who)
        if sessions is None or file not in (None, run.who):
            for event in run.events():
                self.add(event, file)
            return
        self.event_count += run.steps
        self.writers.add(run.who)
        sessions[-1].add_run(run)

    def _add_of_supervisor(self, who: str, what: What) -> None:
        if isinstance(what, Open):
            self._supervisor_was_killed |= self._supervisor_is_open
            self._supervisor_is_open = True
        elif isinstance(what, Launch | Restart):
            self.launches.append((who, what))
        elif isinstance(what, Detect):
            self.detects.append((who, what))
        elif isinstance(what, Judged):
            self.verdicts.append(what)
            self._supervisor_is_open = False
        elif not isinstance(what, Preempt | Scale | Straggler | Other | Malformed):
            self.misplaced.append(f"{who} wrote {named(what)} event, which only a rank writes")

    @property
    def supervisor_counts_attempts(self) -> bool:
        """True if supervisor and ranks number the attempts alike.

        The numbers may differ with several nodes, or if a supervisor was killed before it recorded a start."""
        names = {who for who, _ in self.launches}
        last = max((launch.attempt for _, launch in self.launches), default=0)
        return names == {"supervisor"} and not self._supervisor_was_killed and last >= max(self.attempts, default=0)

    @cached_property
    def sessions(self) -> Mapping[str, Sequence[RankSession]]:
        """The events of every worker process, by writer name such as "rank-0"; the oldest process comes first."""
        return {who: self._sessions[who] for who in sorted(self._sessions, key=lambda who: rank_of(who) or 0)}

    @cached_property
    def attempts(self) -> Mapping[int, Sequence[RankSession]]:
        """The `RankSession` of every worker process in each attempt, by attempt number."""
        attempts: defaultdict[int, list[RankSession]] = defaultdict(list)
        for sessions in self.sessions.values():
            for session in sessions:
                if session.attempt is not None:
                    attempts[session.attempt].append(session)
        return {number: attempts[number] for number in sorted(attempts)}

    @cached_property
    def plans(self) -> Sequence[tuple[RankSession, Plan]]:
        """Pairs (worker process, training plan that it recorded), ordered by attempt and rank."""
        return [(session, session.plan) for sessions in self.attempts.values() for session in sessions if session.plan]

    @cached_property
    def corruptions(self) -> Mapping[int, Corruption]:
        """The corruption that ended an attempt, by the number of the attempt."""
        sessions = ((number, session) for number, sessions in self.attempts.items() for session in sessions)
        return {number: session.corruption for number, session in sessions if session.corruption}

    def trusted_end(self, attempt: int) -> int:
        """Return the first step of `attempt` whose result may be wrong because a bit had flipped."""
        corruption = self.corruptions.get(attempt)
        return EVERY_STEP if corruption is None else corruption.agreed or 0

    @property
    def has_trained(self) -> bool:
        sessions = (session for sessions in self._sessions.values() for session in sessions)
        return any(session.plan or session.recover or len(session.steps) for session in sessions)

    @cached_property
    def sample_plan(self) -> RunPlan:
        """The plan that assigns samples to steps: the first recorded plan, lengthened if the user extended the run."""
        if not self.plans:
            raise CannotTell("no plan event says which samples to train")
        session, plan = self.plans[0]
        longest = max(
            (longer for _, longer in self.plans if longer.extends), key=lambda recorded: recorded.steps, default=plan
        )
        last = max((plan, longest), key=lambda recorded: recorded.steps)
        first = {**plan._asdict(), "epochs": last.epochs, "limit": last.limit}
        phases: list[SamplePlan] = []
        try:
            for phase in (first, *last.later_phases):
                phases.append(
                    SamplePlan.from_json(phase, self._orders_of(phase, sum(before.epochs for before in phases)))
                )
        except BadInput as error:
            raise CannotTell(f"the plan of {session.who} cannot be trained: {error}") from error
        run_plan = RunPlan(tuple(phases))
        if max(*run_plan.first_steps, *run_plan.first_epochs) >= _LONGEST:
            raise CannotTell(f"the plan of {session.who} has {run_plan.steps} steps, which cannot be")
        return run_plan

    def _orders_of(self, phase: Mapping[str, Any], first_epoch: int) -> RecordedOrders | None:
        if (digest := phase.get("sampler")) is None:
            return None
        sessions = (session for sessions in self.attempts.values() for session in sessions)
        return RecordedOrders(sessions, phase["samples"], digest, range(first_epoch, first_epoch + phase["epochs"]))

    @property
    def orders(self) -> list[RecordedOrders]:
        """The recorded sample orders of each training phase that uses the script's own sampler."""
        return [phase.orders for phase in self.sample_plan.phases if isinstance(phase.orders, RecordedOrders)]

    def step_name(self, step: int) -> str:
        """Return `step` as text for messages, with its epoch and its index in that epoch."""
        return f"{self.sample_plan.position(step)} (step {step})"

    @property
    def lineage(self) -> Lineage:
        """The steps and commits that no restore has rolled back by the end of the history."""
        return self._followed[0]

    @cached_property
    def restores(self) -> Sequence[Restore]:
        """Every restore of a snapshot by a rank, with the commit event of that snapshot, sorted by attempt and rank."""
        return self._followed[1]

    @cached_property
    def saves(self) -> Sequence[CommittedSave]:
        """The committed snapshots in the order of attempts, each with the attempt that trained its last step."""
        return self._followed[2]

    @cached_property
    def _followed(self) -> tuple[Lineage, list[Restore], list[CommittedSave]]:
        lineage = Lineage()
        restores: list[Restore] = []
        saves: list[CommittedSave] = []
        trainers: dict[int, int | None] = {}  # by step, for the last commit of that step
        for sessions in self.attempts.values():
            commits = [commit for session in sessions for commit in session.commits]
            saves += [_follow_commit(lineage, commit, trainers) for commit in commits if commit.found]
            counted = dict(lineage.commits)
            for session in sessions:
                recover = session.recover
                if recover is None or self.has_joined(session):
                    continue
                step = -1 if recover.restored is None else recover.restored
                restores.append(Restore(session, recover, counted.get(step), trainers.get(step), step in trainers))
                lineage.add(recover)
            saves += [_follow_commit(lineage, commit, trainers) for commit in commits if not commit.found]
        return lineage, restores, saves

    @cache  # noqa: B019  # a record is used by one audit
    def memberships(self, attempt: int) -> Memberships:
        sessions = self.attempts.get(attempt, ())
        plan = self.sample_plan if any(session.regroups for session in sessions) else None
        return Memberships(attempt, self.world(attempt), sessions, plan)

    @cached_property
    def live_attempts(self) -> Sequence[Memberships]:
        """The `Memberships` of every attempt that lost or gained workers while other workers continued to train."""
        return [self.memberships(n) for n, sessions in self.attempts.items() if any(s.regroups for s in sessions)]

    @cached_property
    def joins(self) -> Mapping[int, Join]:
        """The `Join` of each worker that joined a running attempt, by the `id()` of its `RankSession`."""
        changes = (change for memberships in self.live_attempts for change in memberships.changes)
        return {id(join.session): join for change in changes for join in change.joined if join.session}

    def has_joined(self, session: RankSession) -> bool:
        """Return True if the process of `session` joined while others trained, and received its state from them."""
        return id(session) in self.joins

    def never_joined(self, session: RankSession) -> bool:
        """Return True if the process of `session` was started to replace a lost worker, but ended before it joined."""
        is_live = any(memberships.attempt == session.attempt for memberships in self.live_attempts)
        return (is_live or self.recovery not in (None, "restart")) and session.is_idle

    def counted_rows(self, session: RankSession) -> Numbers:
        """Return the indices of the steps in `session` that were not rolled back and contributed their gradients."""
        limit = self.lineage.limit(session.attempt or 0)
        steps = session.steps.step
        is_live = session.attempt is not None and bool(self.live_attempts)
        void = self.memberships(session.attempt or 0).void_step(session) if is_live else None
        if void is None and session.steps.is_consecutive and len(steps):
            return counting(0, min(len(steps), max(0, limit - int(steps[0]))))
        if void is None and (not len(steps) or steps.max() < limit):
            return np.arange(len(steps))
        return np.flatnonzero((steps < limit) & (steps != (-1 if void is None else void)))

    def counted_steps(self, session: RankSession) -> Numbers:
        """Return the steps at the indices `counted_rows`, as a view if they are the first ones."""
        rows, steps = self.counted_rows(session), session.steps.step
        return steps[: len(rows)] if not len(rows) or rows[-1] == len(rows) - 1 else steps[rows]

    @cached_property
    def trained(self) -> Mapping[int, Numbers]:
        """The sorted steps of each attempt that were not rolled back; attempts without such steps are left out."""
        trained: dict[int, Numbers] = {}
        for attempt, sessions in self.attempts.items():
            if len(steps := union(self.counted_steps(session) for session in sessions)):
                trained[attempt] = steps
        return trained

    def tensor_parallel(self, attempt: int) -> int:
        """Return the number of ranks in each group that trained the same samples in `attempt`."""
        return next((session.tensor_parallel for session in self.attempts.get(attempt, ()) if session.plan), 1)

    def world(self, attempt: int) -> int:
        """Return the world size that `attempt` started with; raise CannotTell if it is not recorded."""
        worlds = (session.world for session in self.attempts.get(attempt, ()) if session.world is not None)
        if (world := next(worlds, None)) is None:
            raise CannotTell(f"the history does not say how many ranks attempt {attempt} had")
        return world

    @cached_property
    def absent_nodes(self) -> list[int]:
        """The numbers of nodes whose supervisor has no event file; only the first few, enough for a message."""
        absent = (node for node in range(self.nodes) if self.nodes > 1 and f"supervisor-{node}" not in self.writers)
        return list(islice(absent, SHOWN + 1))

    @property
    def nodes(self) -> int:
        """The number of nodes that the run began with."""
        return max((launch.nodes for _, launch in self.launches if isinstance(launch, Launch)), default=1)

    def absent_ranks(self, attempt: int) -> list[str]:
        """Return the names (such as "rank-3") of the first few ranks without events of `attempt`."""
        world = self.world(attempt)
        present = {session.rank for session in self.attempts.get(attempt, ())}
        if sum(rank < world for rank in present) == world:
            return []
        return list(islice((f"rank-{rank}" for rank in range(world) if rank not in present), SHOWN))

    @cached_property
    def absent_parts(self) -> list[str]:
        """The first few ranks without events of an attempt that counts, such as "rank-3 of attempt 2"."""
        parts = (f"{who} of attempt {attempt}" for attempt in self.trained for who in self.absent_ranks(attempt))
        return list(islice(parts, SHOWN + 1))

    def reports(self, step: int) -> list[ShareReport]:
        """Return the samples that each rank recorded for `step`, in all attempts where the step was not rolled back."""
        reports: list[ShareReport] = []
        for attempt, sessions in self.attempts.items():
            for session in sessions:
                counted = self.counted_rows(session)
                for row in counted[session.steps.step[counted] == step].tolist():
                    place = session.placement(row)
                    reports.append(ShareReport(session.who, *place, attempt, session.steps.samples(row)))
        return reports


def _follow_commit(lineage: Lineage, commit: Commit, trainers: dict[int, int | None]) -> CommittedSave:
    trainer = trainers[commit.step] = lineage.trainer(commit.step - 1)
    lineage.add(commit)
    return CommittedSave(commit, trainer)
